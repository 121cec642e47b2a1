"""The report as one HTML page that needs nothing else: no server, no network, no other file.

The timelines are drawn by `page.js` from data in the page; all they say stands in tables beneath as well. Names come
from the graph and may hold anything, so they are escaped here, and only ever set as text there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tf_caramel.planner.plan import Piece
from tf_caramel.planner.record import Record
from tf_caramel.planner.simulate import Outcome
from tf_caramel.see.reports import Entry, Step
from tf_caramel.see.tables import DEFERRED, Grid, grids, milliseconds, ratio, remarks, size
from tf_caramel.see.timeline import BACKWARD, FORWARD, UPDATE, blocks, lanes, made_by, phases, without

BLOCKS = 6000  # in all timelines of a page together: what keeps it below 2 MB
LONGEST = 96  # characters of a name in a timeline
_KINDS = (FORWARD, BACKWARD, UPDATE)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_HINT = (
    "Point at an op or a message, or click it, to see its name, times and members. Keys: arrows go from message to "
    "message, + and - zoom, 0 shows the whole step; Ctrl with the wheel zooms, dragging moves."
)


def html(entries: Sequence[Entry]) -> str:
    """The whole page."""
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    limit = BLOCKS // (2 * max(1, sum(e.step is not None for e in entries)))
    title = escape(", ".join(e.name for e in entries))
    body = "\n".join(_section(entry, limit) for entry in entries)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title} - tf_caramel report</title>
<style>
{style}</style>
</head>
<body>
<header><h1>tf_caramel report</h1></header>
<main>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _section(entry: Entry, limit: int) -> str:
    parts = ['<section class="entry">', f"<h2>{escape(entry.name)}</h2>"]
    if entry.step:
        parts += [
            _lead(entry.step, entry.record),
            _cards(entry.step, entry.record),
            _figure(entry.step, entry.record, limit),
        ]
    said = remarks(entry)
    if said:
        parts.append("<h3>Notes</h3><ul>" + "".join(f"<li>{escape(s)}</li>" for s in said) + "</ul>")
    parts += [f"<h3>{escape(g.title)}</h3>{_table(g)}" for g in grids(entry)]
    if entry.step:
        parts += [_messages(label, outcome) for label, outcome in reversed(entry.step.outcomes)]
    return "\n".join([*parts, "</section>"])


def _lead(step: Step, record: Record | None) -> str:
    profile = step.profile
    facts = f"{len(profile.ops):,} ops, {len(profile.transfers):,} gradients, {size(profile.bytes_)}"
    runs = {
        "static": "the static plan runs",
        "traced": "the function runs as it was traced",
        step.arm: "this plan runs",
    }
    ranks = record.ranks if record else profile.network.ranks
    end = f"; {runs.get(record.chosen, 'another plan runs')}" if record else ""
    return f'<p class="muted">{ranks} ranks; {facts}; plan: {escape(step.origin)}{end}.</p>'


def _cards(step: Step, record: Record | None) -> str:
    """The numbers that a reader looks for first, before and after."""
    before, after = step.before, step.after

    def times(old: float, new: float) -> tuple[str, str]:
        change = ""  # of nothing there is no percentage
        if old:
            percent = f"{(new / old - 1) * 100:+.1f}"
            change = "unchanged" if percent[1:] == "0.0" else f"{percent} %".replace("-", "\u2212")
        return f"{milliseconds(old)} \u2192 {milliseconds(new)}", change

    cards = [("Step in ms, simulated", *times(before.step_seconds, after.step_seconds))]
    measured = (record.median("traced"), record.median(step.arm)) if record else (None, None)
    if measured[0] is not None and measured[1] is not None:
        cards.append(("Step in ms, measured (median)", *times(measured[0], measured[1])))
    cards += [
        ("Exposed communication in ms", *times(before.exposed_seconds, after.exposed_seconds)),
        ("Efficiency E", f"{ratio(before.efficiency)} \u2192 {ratio(after.efficiency)}", "1: all hidden, 0: none"),
        ("Messages", f"{len(before.messages):,} \u2192 {len(after.messages):,}", ""),
    ]
    inside = "".join(f"<div><dt>{a}</dt><dd>{b}{f'<small>{c}</small>' if c else ''}</dd></div>" for a, b, c in cards)
    return f'<dl class="cards">{inside}</dl>'


def _figure(step: Step, record: Record | None, limit: int) -> str:
    before, after = step.before, step.after
    label = (
        "Timelines of a simulated step. "
        f"Before: {len(before.messages)} messages, {milliseconds(before.step_seconds)} ms. "
        f"After: {len(after.messages)} messages, {milliseconds(after.step_seconds)} ms. The tables of messages beneath "
        "say the same in text."
    )
    legend = "".join(
        f'<li><canvas aria-hidden="true" data-kind="{kind}"></canvas>{text}</li>'
        for kind, text in (
            (FORWARD, "forward"),
            (BACKWARD, "backward"),
            (UPDATE, "update"),
            ("message", "message"),
            ("exposed", "exposed: nothing is computed meanwhile"),
        )
    )
    buttons = "".join(
        f'<button type="button" data-act="{act}" aria-label="{says}">{text}</button>'
        for act, text, says in (
            ("in", "+", "zoom in"),
            ("out", "\u2212", "zoom out"),
            ("whole", "whole step", "whole step"),
        )
    )
    data = json.dumps(_data(step, record, limit), separators=(",", ":"), allow_nan=False)
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f"""<figure>
<div class="bar"><ul class="keys">{legend}</ul><span>{buttons}</span></div>
<div class="plot">
<canvas role="img" tabindex="0" aria-label="{escape(label)}"></canvas>
<div class="tip" hidden></div>
</div>
<p class="detail" aria-live="polite" data-empty="{escape(_HINT)}">{escape(_HINT)}</p>
<figcaption>Forward, backward and update are guessed from the graph; ops thinner than a pixel are drawn as one.
<noscript>The timelines need JavaScript; the tables beneath do not.</noscript></figcaption>
<script type="application/json">{data}</script>
</figure>"""


def _data(step: Step, record: Record | None, limit: int) -> dict[str, Any]:
    """What page.js draws. Times in whole microseconds; names are positions in `names`."""
    names: dict[str, int] = {}

    def name(text: str) -> int:
        short = text if len(text) <= LONGEST else f"{text[: LONGEST // 3]}\u2026{text[1 - LONGEST + LONGEST // 3 :]}"
        return names.setdefault(short, len(names))

    tracks = [_track(label, step, outcome, limit, name) for label, outcome in step.outcomes]
    if record and record.observed:
        seen = sorted(record.observed, key=lambda o: (o.start, o.done, o.name))
        messages = [
            {"members": [name(o.name)], "bytes": o.bytes_, "start": _us(o.start), "end": _us(o.done), "lane": lane}
            for o, lane in zip(seen, lanes((o.start, o.done) for o in seen), strict=True)
        ]
        tracks.append(_network_only("observed: messages of a traced step, static plan", messages))
    end = max([t["step"] for t in tracks] + [m["end"] for t in tracks for m in t["messages"]])
    made = [[name(transfer), name(op)] for transfer, op in made_by(step.profile).items()]
    return {"end": max(1, end), "names": list(names), "made": made, "tracks": tracks}


def _track(label: str, step: Step, outcome: Outcome, limit: int, name: Callable[[str], int]) -> dict[str, Any]:
    phase_of = phases(step.profile)
    streams = 1 + max((s.stream for s in outcome.spans), default=0)
    merged = blocks(outcome.spans, phase_of, limit)
    lane_of = lanes((m.start, m.end) for m in outcome.messages)
    messages = []
    for m, lane in zip(outcome.messages, lane_of, strict=True):
        pieces = [Piece.parse(text) for text in m.pieces]
        times = {"ready": m.ready, "submitted": m.submitted, "start": m.start, "end": m.end, "needed": m.needed}
        parts = [str(p)[len(p.transfer) :] for p in pieces]  # "[0/4]" of a chunk
        messages.append(
            {"members": [name(p.transfer) for p in pieces], "bytes": m.bytes_, "slack": _us(m.slack), "lane": lane}
            | {key: _us(seconds) for key, seconds in times.items()}
            | ({"part": parts} if any(parts) else {})
        )
    bare = without(((m.start, m.end) for m in outcome.messages), ((s.start, s.end) for s in outcome.spans))
    return _network_only(label, messages) | {
        "step": _us(outcome.step_seconds),
        "streams": streams,
        "blocks": [
            [name(b.name), b.count, _KINDS.index(b.phase), b.stream, _us(b.start), _us(b.end) - _us(b.start)]
            for b in merged
        ],
        "exposed": [[_us(start), _us(end)] for start, end in bare if _us(end) > _us(start)],
    }


def _network_only(label: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A track whose compute is not known."""
    nothing: dict[str, Any] = {"step": 0, "streams": 0, "blocks": [], "exposed": []}
    return nothing | {"label": label, "messages": messages, "lanes": 1 + max((m["lane"] for m in messages), default=0)}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _messages(label: str, outcome: Outcome) -> str:
    """All messages of a step, folded: what the timeline shows, as text."""
    times = [(m.ready, m.submitted, m.start, m.end, m.needed, m.slack) for m in outcome.messages]
    columns = ("message", "members", "bytes", "start boundary", "submitted", "sent", "arrived", "end boundary", "slack")
    rows = tuple(
        (f"#{k}" + (DEFERRED if m.deferred else ""), ", ".join(m.pieces), size(m.bytes_), *map(milliseconds, seconds))
        for k, (m, seconds) in enumerate(zip(outcome.messages, times, strict=True), 1)
    )
    note = "In the order in which they travel. Times in ms from the beginning of the step."
    table = _table(Grid("", columns, rows, note, names=2))
    return f"<details><summary>All {len(rows):,} messages, {escape(label)}</summary>{table}</details>"


def _table(grid: Grid) -> str:
    """Columns of names to the left, numbers to the right; the first cell of a row names it."""
    kinds = [' class="name"' if k < grid.names else "" for k in range(len(grid.columns))]
    head = "".join(f'<th scope="col"{kind}>{escape(c)}</th>' for kind, c in zip(kinds, grid.columns, strict=True))
    body = "".join(
        f'<tr><th scope="row"{kinds[0]}>{escape(cells[0])}</th>'
        + "".join(f"<td{kind}>{escape(c)}</td>" for kind, c in zip(kinds[1:], cells[1:], strict=True))
        + "</tr>\n"
        for cells in grid.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>" if grid.rows else ""
    note = f'<p class="note">{escape(grid.note)}</p>' if grid.note else ""
    return f'<div class="scroll">{table}</div>{note}'
