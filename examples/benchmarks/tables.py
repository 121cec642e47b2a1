"""The Markdown of a run: what was to be reached, a summary of all cells, then one table for each cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from examples.benchmarks import arms, scale
from examples.benchmarks.figures import PRODUCT, TUNED, Figures, Row, figures
from examples.benchmarks.targets import reached

Cells = Mapping[str, Mapping[str, Any]]


def markdown(results: Mapping[str, Any]) -> str:
    """The whole document. results: as results.json holds it."""
    cells: Cells = results["cells"]
    seen = {key: figures(cell) for key, cell in cells.items()}
    parts = [
        "# tf_caramel against its competitors",
        f"Made by {', '.join(f'`{c}`' for c in results['commands'])} on {results['machine']}, {results['date']}.",
        "Step times are medians; competitors took turns in one run. C: computing alone, N: all gradients in one "
        "message alone, both measured in the same run. **bound**: max(C, N). **bound with CPU**: that, and no less "
        "than the CPU time of C and N together, for computing and communicating share one core.",
        "## To reach",
        _table(
            ("target", "measured", "reached", "why"),
            ([t.text, t.measured, t.verdict, t.why] for t in reached(cells, seen)),
        ),
    ]
    for ground in dict.fromkeys(cell["ground"] for cell in cells.values()):
        there = {key: cell for key, cell in cells.items() if cell["ground"] == ground}
        parts += [f"## {ground}", _summary(there, seen)]
        for key, cell in there.items():
            parts += [f"### {title(cell)}", *_cell(cell, seen[key])]
    parts += [f"Not measured: {why}." for why in results["skipped"]]
    parts += _simulated(cells)
    return "\n\n".join(parts) + "\n"


def title(cell: Mapping[str, Any]) -> str:
    link = f"{cell['mbit']:g} Mbit/s" if cell["emulated"] else "loopback"
    balance = ", where computing and the network take equally long" if cell.get("balance") else ""
    waiting = (
        f", emulated accelerator, compute/communication {cell['accelerator']:g}" if cell.get("accelerator") else ""
    )
    return f"{cell['model']}, batch {cell['batch']}, {cell['hosts']} hosts, {link}{balance}{waiting}"


_VERSUS = (TUNED, arms.AS_IT_COMES.name, arms.UNFUSED.name, arms.MWMS.name)


def _summary(cells: Cells, seen: Mapping[str, Figures]) -> str:
    """A row a cell: how many times faster than each competitor the product is."""
    head = (
        "model and link",
        "C ms",
        "N ms",
        "bound ms",
        "with CPU",
        f"{PRODUCT} ms",
        "E",
        *(f"x {name}" for name in _VERSUS),
    )
    rows = []
    for key, cell in cells.items():
        f = seen[key]
        mine = f.rows.get(PRODUCT)
        step, efficiency = (mine.seconds, mine.efficiency) if mine else (None, None)
        times = [number(f.times(PRODUCT, other)) for other in _VERSUS]
        alone = [ms(seconds) for seconds in (f.compute, f.network, f.bound, f.bound_with_cpu, step)]
        rows.append([title(cell), *alone, number(efficiency), *times])
    return _table(head, rows)


def _cell(cell: Mapping[str, Any], f: Figures) -> list[str]:
    head = (
        "", "step ms", "spread", "images/s", "scaling", "E", "exposed ms", "to bound", "messages", "MB sent", "CPU ms",
        "memory MB", "first step s",
    )  # fmt: skip
    facts = (
        f"C {ms(f.compute)} ms, N {ms(f.network)} ms, bound {ms(f.bound)} ms, bound with CPU {ms(f.bound_with_cpu)} ms"
    )
    notes = [f"{cell['description']}. {facts}; load {cell['load'][0]:.1f}."]
    tuning = cell.get("tuning", {})
    if tuning:
        notes.append(f"Of the {tuning['cells']} cells of Horovod's tuning {len(tuning['quick'])} were measured.")
    if "autotune" in tuning:
        notes.append(f"Horovod tuned itself for {tuning['autotune']['steps']} steps first.")
    for name, why in cell.get("missing", {}).items():
        notes.append(f"Not there: {name}: {why}.")
    notes += [f"Not there: {why}." for why in cell.get("why", [])]
    again = sum(turn["again"] for arm in cell["arms"].values() for turn in arm["turns"])
    if again:
        notes.append(f"{again} turns were measured again, for others used the machine.")
    rows = [_row(row) for row in sorted(f.rows.values(), key=lambda row: row.seconds)]
    return [" ".join(notes), _table(head, rows)]


def _simulated(cells: Cells) -> list[str]:
    """What the simulator says of more ranks, after what was measured and how far the simulator is off there."""
    parts: list[str] = []
    for cell in cells.values():
        simulated = {int(ranks): times for ranks, times in cell.get("simulated", {}).items()}
        if not simulated:
            continue
        rows = []
        known = simulated.get(cell["hosts"])
        if known:
            off = scale.errors(cell, known)
            measured = [f"{ms(off[p][0])} ({off[p][1]:+.0%})" if p in off else "-" for p in scale.POLICIES]
            rows.append([f"{cell['hosts']} measured (simulator off by)", *measured])
        rows += [[str(ranks), *(ms(times[p]) for p in scale.POLICIES)] for ranks, times in simulated.items()]
        parts += [f"### {title(cell)}", _table(("ranks", *scale.POLICIES.values()), rows)]
    head = "Step times in ms, from the profile of the cell, on a ring of links of that speed."
    return ["## Simulated: more ranks than there are here", head, *parts] if parts else []


def _row(row: Row) -> list[str]:
    name = f"**{row.name}** ({row.same_as.removeprefix(PRODUCT).strip()})" if row.same_as else row.name
    return [
        name, ms(row.seconds), f"{row.spread:.0%}", f"{row.images:.1f}", number(row.scaling), number(row.efficiency),
        ms(row.exposed), number(row.to_bound), number(row.messages, 1), f"{row.sent_bytes / 1e6:.1f}",
        ms(row.cpu_seconds), f"{row.peak_bytes / 1e6:.0f}", number(row.first_seconds, 1),
    ]  # fmt: skip


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}" if abs(seconds) >= 0.01 else f"{1e3 * seconds:.1f}"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
