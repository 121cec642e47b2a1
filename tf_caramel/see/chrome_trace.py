"""The simulated steps, before and after, and observed messages in Chrome's Trace Event Format, which Perfetto opens.

Of the format: "X" (complete) events with ts and dur in microseconds, and "M" (metadata) events that name processes and
threads. A process is one step; its threads are the compute streams and the network. Events of a thread do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tf_caramel.planner.plan import Piece
from tf_caramel.planner.simulate import Message, Outcome
from tf_caramel.see.reports import Entry, Step
from tf_caramel.see.timeline import lanes, made_by, phases

NETWORK = 1000  # first thread of the network, behind all compute streams


def to_json(entries: Sequence[Entry]) -> str:
    """All entries; times begin with each step."""
    events: list[dict[str, Any]] = []
    process = 0
    for entry in entries:
        prefix = f"{entry.name}: " if len(entries) > 1 else ""
        parts = [*_simulated(entry.step)] if entry.step else []
        if entry.record and entry.record.observed:
            parts.append(("observed: a traced step, static plan", _observed(entry)))
        for name, inside in parts:
            process += 1
            events += _process(process, prefix + name, inside)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)


def _simulated(step: Step) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    phase_of, made = phases(step.profile), made_by(step.profile)
    for name, outcome in step.outcomes:
        ops = [_event(s.name, phase_of[s.name], s.stream + 1, s.start, s.end) for s in outcome.spans]
        yield name, ops + _messages(outcome, made)


def _messages(outcome: Outcome, made: dict[str, str]) -> list[dict[str, Any]]:
    messages = sorted(outcome.messages, key=lambda m: (m.start, m.end))
    return [
        _event(title(m), "message", NETWORK + lane, m.start, m.end, _facts(m, made))
        for m, lane in zip(messages, lanes((m.start, m.end) for m in messages), strict=True)
    ]


def title(message: Message) -> str:
    """Its first member, and how many more."""
    more = len(message.pieces) - 1
    return message.pieces[0] + (f" and {more} more" if more else "")


def _facts(message: Message, made: dict[str, str]) -> dict[str, Any]:
    return {
        "members": list(message.pieces),
        "made by": [made[Piece.parse(piece).transfer] for piece in message.pieces],
        "bytes": message.bytes_,
        "start boundary (ms)": round(message.ready * 1e3, 6),
        "submitted (ms)": round(message.submitted * 1e3, 6),
        "end boundary (ms)": round(message.needed * 1e3, 6),
        "slack (ms)": round(message.slack * 1e3, 6),
    } | ({"deferred": True} if message.deferred else {})


def _observed(entry: Entry) -> list[dict[str, Any]]:
    seen = sorted(entry.record.observed if entry.record else (), key=lambda o: (o.start, o.done, o.name))
    return [
        _event(o.name, "observed", NETWORK + lane, o.start, o.done, {"bytes": o.bytes_})
        for o, lane in zip(seen, lanes((o.start, o.done) for o in seen), strict=True)
    ]


def _event(
    name: str, category: str, thread: int, start: float, end: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    """ts and dur rounded to nanoseconds, such that an event ends before the next of its thread begins."""
    begin, finish = (round(t * 1e6, 3) for t in (start, end))
    times = {"ts": begin, "dur": round(finish - begin, 3)}
    return {"name": name, "cat": category, "ph": "X", "tid": thread} | times | ({"args": args} if args else {})


def _process(process: int, name: str, events: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    def metadata(kind: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": args}

    yield metadata("process_name", 0, name=name)
    yield metadata("process_sort_index", 0, sort_index=process)
    for thread in sorted({e["tid"] for e in events}):
        kind, number = ("network", thread - NETWORK + 1) if thread >= NETWORK else ("compute", thread)
        yield metadata("thread_name", thread, name=kind if number == 1 else f"{kind} {number}")
        yield metadata("thread_sort_index", thread, sort_index=thread)
    for event in sorted(events, key=lambda e: (e["ts"], e["tid"])):
        yield event | {"pid": process}
