"""The tables of a report as plain text cells, and as they look in a terminal. The page shows the same cells."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tf_caramel.planner.plan import Piece
from tf_caramel.planner.profile import Network, Profile
from tf_caramel.planner.record import Record
from tf_caramel.planner.simulate import Message, Outcome
from tf_caramel.planner.what_if import Row, scaling
from tf_caramel.see.reports import Entry, Step
from tf_caramel.see.timeline import made_by, ready_times

OTHERS = {
    "static": "static plan, made without times",
    "measured": "plan from the profile",
    "deferred": "plan with updates in the next step",
    "loose": "the same, the rest fused by Horovod",
}
LEAST = 10
DEFERRED = " (deferred)"  # after the names of what is deferred
TAPE = "gradient_tape/"  # before the names of most ops that make gradients
_NONE = "-"


@dataclass(frozen=True)
class Grid:
    """A table of text.  names: so many first columns are names, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    names: int = 1


def milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:,.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def size(bytes_: float) -> str:
    """With decimal units, like Gbit/s."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_ >= factor:
            return f"{bytes_ / factor:,.1f} {unit}"
    return f"{bytes_:.0f} B"


def grids(entry: Entry) -> list[Grid]:
    """All tables of an entry that has a step; none if it has not."""
    if entry.step is None:
        return []
    return [summary(entry.step, entry.record), least_slack(entry.step), network(entry.step.profile.network)]


def summary(step: Step, record: Record | None = None) -> Grid:
    """Before and after, simulated, beside what was measured in turns."""

    def mark(arm: str) -> str:
        return "  (this one runs)" if record and record.chosen == arm else ""

    def row(label: str, arm: str, outcome: Outcome) -> tuple[str, ...]:
        measured = record.median(arm) if record else None
        return (
            label + mark(arm),
            str(len(outcome.messages)),
            size(sum(m.bytes_ for m in outcome.messages)),
            milliseconds(outcome.step_seconds),
            milliseconds(measured),
            milliseconds(outcome.exposed_seconds),
            ratio(outcome.efficiency),
        )

    rows = [row(label, arm, o) for arm, (label, o) in zip(("traced", step.arm), step.outcomes, strict=True)]
    for arm, label in OTHERS.items():  # measured, but their plan is not here
        if record and arm != step.arm and (arm in record.arms or record.chosen == arm):
            rows.insert(1, (label + mark(arm), _NONE, _NONE, _NONE, milliseconds(record.median(arm)), _NONE, _NONE))
    communication = step.profile.network.seconds(step.profile.bytes_)
    note = (
        f"Compute takes {milliseconds(step.after.compute_seconds)} ms, all bytes in one message "
        f"{milliseconds(communication)} ms: E = 1 would be a step of "
        f"{milliseconds(max(step.after.compute_seconds, communication))} ms, E = 0 one of their sum."
    )
    if step.profile.network.cpu_seconds(1):
        note += " Messages take cores from compute as well: a step can be longer with nothing exposed."
    if step.after.deferred_bytes:
        messages = [m for m in step.after.messages if m.deferred]
        count = len({Piece.parse(piece).transfer for m in messages for piece in m.pieces})
        note += (
            f" Deferred to the head of the next step, after: {count} transfers in {len(messages)} messages; their "
            f"gradients are kept until then, {size(step.after.deferred_bytes)} of extra memory."
        )
    columns = ("", "messages", "bytes", "step ms\nsimulated", "step ms\nmeasured", "exposed\nms", "E")
    return Grid("Step", columns, tuple(rows), note)


def least_slack(step: Step) -> Grid:
    """The transfers that have to hurry most; one that travels in chunks has the slack of its most urgent one."""
    ready = ready_times(step.profile, step.after)
    urgent: dict[str, Message] = {}
    for message in sorted(step.after.messages, key=lambda m: m.slack, reverse=True):
        urgent |= {Piece.parse(piece).transfer: message for piece in message.pieces}
    first = sorted(
        step.profile.transfers, key=lambda t: (urgent[t.name].slack, urgent[t.name].end, ready[t.name], t.name)
    )
    made = made_by(step.profile)
    rows = tuple(
        (
            t.name + (DEFERRED if m.deferred else ""),
            made[t.name].removeprefix(TAPE),
            size(t.bytes_),
            *map(milliseconds, (ready[t.name], m.start, m.end, m.needed, m.slack)),
        )
        for t in first[:LEAST]
        for m in (urgent[t.name],)
    )
    columns = ("gradient", "made by", "bytes", "start\nboundary", "sent", "arrived", "end\nboundary", "slack")
    note = "Times in ms from the beginning of the simulated step, after. Slack 0: the step waits for this transfer."
    return Grid(f"The {len(rows)} transfers with the least slack", columns, rows, note, names=2)


def network(fitted: Network) -> Grid:
    """The fit, and how far each sample is from it."""
    rows = tuple(
        (size(bytes_), milliseconds(seconds), milliseconds(fitted.seconds(bytes_)), f"{residual:+.1%}")
        for (bytes_, seconds), residual in zip(fitted.samples, fitted.residuals(), strict=True)
    )
    note = f"An all-reduce of {fitted.ranks} ranks takes {milliseconds(fitted.start_up_seconds)} ms"
    if fitted.seconds_per_byte:
        note += f" and {fitted.seconds_per_byte * 1e9:.3g} ns a byte ({8e-9 / fitted.seconds_per_byte:.3g} Gbit/s)"
    if fitted.queued_seconds is not None:
        note += f", {milliseconds(fitted.queued_seconds)} ms instead of the start-up when queued behind another"
    cpu = f"{milliseconds(fitted.cpu_seconds_per_message)} ms and {fitted.cpu_seconds_per_byte * 1e9:.2g} ns a byte"
    note += f". Of a rank's cores: {cpu}." + ("" if rows else " There are no samples of it.")
    return Grid("Network", ("message", "measured ms", "fitted ms", "measured /\nfitted - 1"), rows, note)


def what_ifs(profile: Profile, rows: Sequence[Row], policies: Sequence[str], width: int = 120) -> list[Grid]:
    """A row for each set-up, four columns for each policy; as many policies in a table as `width` characters allow."""
    set_up = [
        ("Gbit/s", *("measured" if row.gbit is None else f"{row.gbit:g}" for row in rows)),
        ("ranks", *(f"{row.ranks:,}" for row in rows)),
    ]
    tables = [set_up.copy()]
    for k, policy in enumerate(policies):
        outcomes = [row.outcomes[k] for row in rows]
        columns = [
            (policy.replace("+", "+\n") + "\nstep ms", *(_short(o.step_seconds) for o in outcomes)),
            ("E", *(ratio(o.efficiency) for o in outcomes)),
            ("scal.", *(f"{scaling(profile, o):.1%}" for o in outcomes)),
            ("exposed", *(_short(o.exposed_seconds) for o in outcomes)),
        ]
        if _width([*tables[-1], *columns]) > width and len(tables[-1]) > len(set_up):
            tables.append(set_up.copy())
        tables[-1] += columns
    result = [Grid("", *_transposed(columns), names=0) for columns in tables]
    alone = milliseconds(profile.compute_seconds * max(profile.speeds))
    note = f"Times in ms. Compute alone takes {alone} ms; scal.: scaling, that over the step. E: 1 all hidden, 0 none."
    return [*result[:-1], replace(result[-1], note=note)]


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Characters of a table of these columns, heads first, with two blanks between."""
    return sum(2 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns) - 2


def _transposed(columns: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    head, *rows = zip(*columns, strict=True)
    return head, tuple(rows)


def _short(seconds: float) -> str:
    """In milliseconds, at most six characters up to a thousand seconds."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.2f}"


def remarks(entry: Entry) -> list[str]:
    """What a reader should know besides: why something was not done, what measuring cost."""
    said = list(entry.why)
    record = entry.record
    if record and record.trace_cost is not None:
        traced = f" (steps of {milliseconds(record.traced_step_seconds)} ms)" if record.traced_step_seconds else ""
        said.append(f"Tracing made a step {record.trace_cost:.1%} longer{traced}.")
    if record and record.unmatched:
        said.append(f"{record.unmatched:.1%} of the traced kernels' time belongs to no op of the profile.")
    return said


def to_rich(grid: Grid) -> RenderableType:
    """Names may be folded, numbers never."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    lines = max(column.count("\n") for column in grid.columns)
    for k, column in enumerate(grid.columns):
        head = "\n" * (lines - column.count("\n")) + column
        if k < grid.names:
            table.add_column(
                head, overflow="fold", min_width=min(12, max((len(row[k]) for row in grid.rows), default=0))
            )
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in grid.rows:
        table.add_row(*map(Text, row))
    parts: list[RenderableType] = [Text(grid.title, style="bold")] if grid.title else []
    parts += [table] if grid.rows else []
    parts += [Text(grid.note, style="dim")] if grid.note else []
    return Group(*parts, Text())


def view(entry: Entry) -> RenderableType:
    """All of an entry for a terminal."""
    parts: list[RenderableType] = [Text(entry.name, style="bold underline"), Text(), *map(to_rich, grids(entry))]
    if said := remarks(entry):
        parts += [Text("Notes", style="bold"), *(Text(f"- {sentence}") for sentence in said), Text()]
    return Group(*parts)


def text(entries: Iterable[Entry], width: int = 120) -> str:
    """Without colours, for `print`."""
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, markup=False)
    for entry in entries:
        console.print(view(entry))
    return file.getvalue().rstrip() + "\n"
