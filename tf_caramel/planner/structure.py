"""What a profile's graph implies for orders: who waits for transfers, who needs an op, when gradients are ready.

Profile in, numbers out. What does not depend on the network is computed once for a graph and kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tf_caramel.planner.profile import InputError, Profile

TICKS_PER_SECOND = 10**12  # times are whole picoseconds in the policies, so that sums do not depend on their order
_KEPT_GRAPHS = 4

_T = TypeVar("_T")


def once_a_graph(function: Callable[[Profile], _T]) -> Callable[[Profile], _T]:
    """Keeps a function's results for the last graphs; the function must not use the network.

    Graphs are told apart by identity: profiles that differ in their network share their tuples, and hashing thousands
    of ops would cost more than it saves.
    """
    kept: dict[tuple[Any, ...], tuple[Profile, _T]] = {}

    def cached(profile: Profile) -> _T:
        key = (id(profile.ops), id(profile.transfers), profile.cores, profile.speeds)
        found = kept.get(key)
        if found is None:
            found = kept[key] = (profile, function(profile))  # the profile, so that its ids are not used again
            while len(kept) > _KEPT_GRAPHS:
                kept.pop(next(iter(kept)), None)
        return found[1]

    return cached


def ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)


@once_a_graph
def moved(profile: Profile) -> tuple[bool, ...]:
    """Of each op whether it is the collective or an update of a deferred transfer: of the step before. The ops that
    read such a transfer's parameter wait for it but belong to this step."""
    result = [False] * len(profile.ops)
    if profile.deferred:
        names = set(profile.deferred)
        deferred = [t for t in profile.transfers if t.name in names]
        collectives, readers = {t.op for t in deferred}, {r for t in deferred for r in t.readers}
        for position, op in enumerate(profile.ops):
            after = position not in readers and any(result[i] for i in op.inputs)
            result[position] = after or position in collectives
    return tuple(result)


@once_a_graph
def levels(profile: Profile) -> tuple[int, ...]:
    """Of each op: how many transfers, one after the other, it waits for at most. 0: forward and backward pass.

    A collective has the level of its inputs. Gradients of different levels can neither share a message nor change
    places. What is left of the step before has level -1, and waiting for it counts nothing.
    """
    collectives, before = {t.op for t in profile.transfers}, moved(profile)
    result: list[int] = []
    for position, op in enumerate(profile.ops):
        level = max((result[i] + (i in collectives) for i in op.inputs if not before[i]), default=0)
        result.append(-1 if before[position] else level)
    return tuple(result)


def first_uses(profile: Profile) -> dict[str, int]:
    """Transfer -> position of the first op of a step that reads its parameter; after the last op if none does."""
    level = levels(profile)
    return {t.name: min((r for r in t.readers if not level[r]), default=len(profile.ops)) for t in profile.transfers}


@dataclass(frozen=True)
class Needs:
    """Ops that the same gradients need, taken together: what flow-shop orders are computed from.

    group: of each op its row, -1 if no gradient of level 0 needs it or it waits for a transfer.
    matrix: rows x transfers, True where the transfer's gradient needs the row.  ticks: of each row.
    """

    group: tuple[int, ...]
    matrix: npt.NDArray[np.bool_]
    ticks: npt.NDArray[np.int64]


@once_a_graph
def needs(profile: Profile) -> Needs:
    level, of_op = levels(profile), {t.op: k for k, t in enumerate(profile.transfers)}
    sets = [0] * len(profile.ops)
    for position in reversed(range(len(profile.ops))):
        if level[position]:
            continue
        mine = 1 << of_op[position] if position in of_op else sets[position]
        for i in profile.ops[position].inputs:
            sets[i] |= mine
    rows: dict[int, int] = {}
    group = tuple(-1 if not s or level[k] or k in of_op else rows.setdefault(s, len(rows)) for k, s in enumerate(sets))
    sums = np.zeros(len(rows), np.int64)
    for op, row in zip(profile.ops, group, strict=True):
        if row >= 0:
            sums[row] += ticks(op.seconds)
    return Needs(group, bit_matrix(rows, len(profile.transfers)), sums)


def bit_matrix(sets: Iterable[int], width: int) -> npt.NDArray[np.bool_]:
    """One row for each set, given as a whole number whose bit k stands for member k."""
    count = max(1, (width + 7) // 8)
    packed = np.frombuffer(b"".join(s.to_bytes(count, "little") for s in sets), np.uint8).reshape(-1, count)
    return np.unpackbits(packed, axis=1, bitorder="little", count=width).astype(np.bool_)


def readiness(profile: Profile, edges: Sequence[tuple[str, str]] = ()) -> list[float]:
    """Start boundary of each transfer, seconds: one stream runs the ops as seen, `edges` kept, and no transfer waits
    for another. Ops that wait for transfers and that no other transfer needs (updates) stay out: they can run later.
    Deferred transfers are ready at 0 and arrive one after the other, in order of first use.

    Raises InputError if an edge names an unknown op or closes a circle.
    """
    if not edges and not any(levels(profile)[t.op] for t in profile.transfers):
        return list(_as_seen(profile))  # the network has no part in it
    return _executed(profile, edges)


@once_a_graph
def _as_seen(profile: Profile) -> list[float]:
    return _executed(profile, ())


def _executed(profile: Profile, edges: Sequence[tuple[str, str]]) -> list[float]:
    consumers, waiting = _joined(profile, edges)
    needed = [not level for level in levels(profile)]
    transfer_of = {t.op: k for k, t in enumerate(profile.transfers)}
    for t in profile.transfers:
        needed[t.op] = True
    for position in reversed(range(len(needed))):
        if needed[position]:
            for i in profile.ops[position].inputs:
                needed[i] = True
    ready: list[int] = []
    arriving: list[tuple[float, int]] = []
    deferred = _arrivals(profile)
    result = [0.0] * len(profile.transfers)
    clock = 0.0

    def now_ready(position: int) -> None:
        k = transfer_of.get(position)
        if k is None:
            heapq.heappush(ready, position)
        else:
            result[k] = clock
            travel = profile.network.seconds(profile.transfers[k].bytes_)
            heapq.heappush(arriving, (deferred.get(position, clock + travel), position))

    left = {p for p, n in enumerate(needed) if n}
    for position in sorted(left):
        if not waiting[position]:
            now_ready(position)
    while ready or arriving:
        if not ready:
            clock = max(clock, arriving[0][0])
        if arriving and arriving[0][0] <= clock:
            _, position = heapq.heappop(arriving)
        else:
            position = heapq.heappop(ready)
            clock += profile.ops[position].seconds
        left.remove(position)
        for c in consumers[position]:
            waiting[c] -= 1
            if not waiting[c] and needed[c]:
                now_ready(c)
    if left:
        stuck = ", ".join(profile.ops[p].name for p in sorted(left)[:5])
        raise InputError(f"edges: with them, these ops wait for each other in a circle: {stuck}")
    return result


def _arrivals(profile: Profile) -> dict[int, float]:
    """Of each deferred collective when it arrives, if start-ups cost nothing but once."""
    names, uses = set(profile.deferred), first_uses(profile) if profile.deferred else {}
    bytes_, result = 0, {}
    for t in sorted((t for t in profile.transfers if t.name in names), key=lambda t: (uses[t.name], t.op)):
        bytes_ += t.bytes_
        result[t.op] = profile.network.seconds(bytes_)
    return result


def _joined(profile: Profile, edges: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[int]]:
    """Consumers of each op and how many ops each waits for, with the edges."""
    consumers: list[list[int]] = [[] for _ in profile.ops]
    waiting = [len(op.inputs) for op in profile.ops]
    for position, op in enumerate(profile.ops):
        for i in op.inputs:
            consumers[i].append(position)
    if edges:
        place = {op.name: k for k, op in enumerate(profile.ops)}
        for source, target in edges:
            for name in (source, target):
                if name not in place:
                    raise InputError(f"edges: {name!r} is not an op of this step")
            consumers[place[source]].append(place[target])
            waiting[place[target]] += 1
    return consumers, waiting
