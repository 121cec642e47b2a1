"""From the tracer's events of one call to a time for each op of the step body.

Pure: events in, times out. Executed kernels carry a prefix (the calls that were inlined) before the body's node names,
which the collectives, whose names are known, give away.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

GAP_SECONDS = 0.0003  # the executor's own time between two ops is shorter; a longer gap is waiting


@dataclass(frozen=True)
class StepTimes:
    """seconds: op -> its share of the wall clock, all executions of one step together.
    start: op -> when it was first seen to start, from the beginning of the step.
    messages: (collective, handed over, done), one execution of each.
    span_seconds: from the first op's start to the last one's end.  steps: how many this call held.
    unmatched: fraction of the kernels' time that no op of the body could be found for.
    alone: the ops that ran while no message was under way.
    """

    seconds: Mapping[str, float]
    start: Mapping[str, float]
    messages: Sequence[tuple[str, float, float]]
    span_seconds: float
    steps: int
    unmatched: float
    alone: frozenset[str]


def step_times(
    kernels: Iterable[tuple[str, float, float]],
    spans: Mapping[str, Sequence[tuple[float, float]]],
    ops: Collection[str],
    collectives: Collection[str],
    taken: float,
) -> StepTimes | None:
    """The times of one call; None if none of `collectives` was seen.

    ops: the body's node names.  collectives: the last parts of the names of what the body hands to Horovod.
    taken: fraction of the rank's cores that a message under way takes from computing: so much of the time that passed
    meanwhile is not the ops' own.
    """
    # A call-back may come a moment after the tracer has stopped: such a message is not counted.
    ended = sorted(name for name, pairs in spans.items() if pairs)
    seen = {name: name.rpartition("/")[2] for name in ended if name.rpartition("/")[2] in collectives}
    if not seen:
        return None
    steps = max(len(spans[name]) for name in seen)
    prefixes = [name[: -len(last)] for name, last in seen.items()]
    prefix = min(prefixes, key=len)  # a collective of the user's own may sit deeper
    find = _finder(ops)
    mine = [(node[len(prefix) :], a, b) for node, a, b in kernels if node.startswith(prefix)]
    if not prefix:  # the input pipeline's kernels look the same then: leave out what is not the step's
        mine = [kernel for kernel in mine if find(kernel[0]) is not None]
    if not mine:
        return None
    began, finished = min(a for _, a, _ in mine), max(b for _, _, b in mine)
    busy = _busy(sorted(span for name in seen for span in spans[name]))
    seconds: dict[str, float] = defaultdict(float)
    start: dict[str, float] = {}
    shared: set[str] = set()
    lost = total = 0.0
    for (name, a, b), share in zip(mine, _shares([(a, b) for _, a, b in mine], busy, taken), strict=True):
        op = find(name)
        total += share
        if op is None:
            lost += share
            continue
        seconds[op] += share / steps
        k = bisect.bisect_left(busy, (b, b))
        if k and busy[k - 1][1] > a:
            shared.add(op)
        start[op] = min(start.get(op, a - began), a - began)
    messages = sorted((seen[name], spans[name][0][0] - began, spans[name][0][1] - began) for name in seen)
    return StepTimes(
        seconds,
        start,
        sorted(messages, key=lambda m: m[1:]),
        finished - began,
        steps,
        lost / total if total else 0.0,
        frozenset(seconds) - shared,
    )


def _busy(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """When a message was under way."""
    result: list[tuple[float, float]] = []
    for a, b in spans:
        if result and a < result[-1][1]:
            result[-1] = (result[-1][0], max(b, result[-1][1]))
        else:
            result.append((a, b))
    return result


def _shares(intervals: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]], taken: float) -> list[float]:
    """Of each interval: an instant that n intervals share counts 1/n; short gaps go to whoever starts next."""
    marks = [(t, kind, k) for k, (a, b) in enumerate(intervals) for t, kind in ((a, 1), (b, 0))]
    marks += [(t, kind, -1) for a, b in busy for t, kind in ((a, 1), (b, 0))]
    marks.sort()
    shares = [0.0] * len(intervals)
    active: dict[int, None] = {}
    under_way, now, idle_since = False, marks[0][0], None
    for t, begins, k in marks:
        passed = (t - now) * (1 - taken if under_way else 1)
        for other in active:
            shares[other] += passed / len(active)
        now = t
        if k < 0:
            under_way = bool(begins)
        elif begins:
            if not active and idle_since is not None and t - idle_since < GAP_SECONDS:
                shares[k] += (t - idle_since) * (1 - taken if under_way else 1)
            active[k] = None
        else:
            active.pop(k, None)
            idle_since = t
    return shares


def _finder(ops: Collection[str]) -> Callable[[str], str | None]:
    """Which op of the body a kernel belongs to: itself, or the call or loop it was inlined from, or what Grappler made
    it from (it puts its own name in front, or marks behind)."""
    found: dict[str, str | None] = {}

    def find(name: str) -> str | None:
        if name not in found:
            found[name] = look(name)
        return found[name]

    def look(name: str) -> str | None:
        path = name.split("/")
        for first in range(min(3, len(path))):
            for last in range(len(path), first, -1):
                candidate = "/".join(path[first:last])
                if candidate in ops:
                    return candidate
        return None

    return find


def merge(calls: Sequence[StepTimes], occupied: float = 1.0) -> StepTimes:
    """Of several calls: each op's time, its median start; messages and spans of the call in the middle.

    An op's time is its shortest one, as far as the cores compute it: what it takes longer is others' doing. On an
    accelerator nobody else takes part, and ops that wait in its queue at the same time share it one way in one step and
    another way in the next, so that only the mean adds up.  occupied: the share of the time in which the cores compute.
    """
    names = sorted({name for call in calls for name in call.seconds})
    middle = sorted(calls, key=lambda c: c.span_seconds)[len(calls) // 2]
    return StepTimes(
        {n: _time([c.seconds[n] for c in calls if n in c.seconds], occupied) for n in names},
        {n: statistics.median(c.start[n] for c in calls if n in c.start) for n in names},
        middle.messages,
        middle.span_seconds,
        middle.steps,
        max(c.unmatched for c in calls),
        frozenset.intersection(*(c.alone for c in calls)),
    )


def _time(seconds: Sequence[float], occupied: float) -> float:
    return occupied * min(seconds) + (1 - occupied) * statistics.fmean(seconds)


def speed(calls: Sequence[StepTimes], merged: StepTimes) -> float:
    """How much longer than its shortest time an op typically takes (1 or more), told by what no message disturbed."""
    ratios = []
    for call in calls:
        names = (
            call.alone if sum(call.seconds[n] for n in call.alone) > 0.1 * sum(call.seconds.values()) else call.seconds
        )
        shortest = sum(merged.seconds[n] for n in names)
        ratios.append(sum(call.seconds[n] for n in names) / shortest if shortest else 1.0)
    return statistics.median(ratios)
