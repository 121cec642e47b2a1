"""Deferral: the step in which some transfers and their updates are those of the step before. Profile in, profile out.

What the gradients and updates of a deferred transfer need was kept at the end of the step before. So at the head of the
step its collective waits for nothing, its updates wait for it alone, and whoever reads its parameter waits for them. A
step ends when all its ops and messages have ended: the simulated step is the one that comes again and again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tf_caramel.planner.order import Order
from tf_caramel.planner.profile import InputError, Op, Profile
from tf_caramel.planner.structure import first_uses, once_a_graph

END = 1e-4  # of the step's compute: an op that takes longer does not merely hold the step's end together
KEPT = 4  # retimed steps of a profile

_kept: dict[int, tuple[weakref.ref[Profile], dict[tuple[str, ...], Profile]]] = {}


def retime(profile: Profile, names: Iterable[str]) -> Profile:
    """The step in which the transfers `names` are deferred; the last ones of a profile are kept while it lives.

    The moved ops come first and start at 0, in order of first use. Raises InputError for a transfer that is not there
    or cannot be deferred (`obstacles`).
    """
    wanted = tuple(sorted(set(names)))
    if not wanted:
        return profile
    key = id(profile)
    kept = _kept.get(key)
    if kept is None or kept[0]() is not profile:
        kept = _kept[key] = (weakref.ref(profile, lambda _: _kept.pop(key, None)), {})
    found = kept[1].get(wanted)
    if found is None:
        found = kept[1][wanted] = _retimed(profile, wanted)
        while len(kept[1]) > KEPT:
            del kept[1][next(iter(kept[1]))]
    return found


@dataclass(frozen=True)
class _Structure:
    """own: of each op the one transfer that it waits for or is the collective of, -1 if none or several.
    ends: ops that only hold the end of the step together.  obstacles: transfer -> why it cannot be deferred.
    """

    own: tuple[int, ...]
    ends: frozenset[int]
    obstacles: dict[str, str]


def obstacles(profile: Profile) -> dict[str, str]:
    """Transfer -> why its updates cannot be told apart from what belongs to other transfers."""
    return dict(_structure(profile).obstacles)


def deferrable(profile: Profile) -> tuple[str, ...]:
    """Names of the transfers that can be deferred."""
    found = obstacles(profile)
    return tuple(t.name for t in profile.transfers if t.deferrable and t.name not in found)


def order_of(there: Profile, profile: Profile, order: Order) -> Order:
    """The order of `profile` for its retimed step `there`: what is deferred goes in order of first use."""
    priority = {t.name: p for t, p in zip(profile.transfers, order.priority, strict=True)}
    uses = first_uses(there)
    priority |= {name: uses[name] for name in there.deferred}
    return replace(order, priority=tuple(priority[t.name] for t in there.transfers))


@once_a_graph
def _structure(profile: Profile) -> _Structure:
    bit = {t.op: 1 << k for k, t in enumerate(profile.transfers)}
    awaited: list[int] = []  # transfers that an op waits for or carries, as bits
    for position, op in enumerate(profile.ops):
        mask = bit.get(position, 0)
        for i in op.inputs:
            mask |= awaited[i]
        awaited.append(mask)
    several = [bool(mask & (mask - 1)) for mask in awaited]
    ends = _ends(profile, several, bit)
    found: dict[str, str] = {}
    blocked = 0
    for position, op in enumerate(profile.ops):
        if several[position] and position not in ends and awaited[position] & ~blocked:
            names = [profile.transfers[k].name for k in _bits(awaited[position])]
            for k in _bits(awaited[position] & ~blocked):
                name = profile.transfers[k].name
                other = next(n for n in names if n != name)
                found[name] = f"the op {op.name!r} waits for it and for {other!r}"
            blocked |= awaited[position]
    own = tuple(-1 if several[p] else mask.bit_length() - 1 for p, mask in enumerate(awaited))
    for k, t in enumerate(profile.transfers):
        for r in t.readers:
            if own[r] not in (-1, k):
                name = profile.transfers[own[r]].name
                found.setdefault(name, f"its update {profile.ops[r].name!r} reads the parameter of {t.name!r}")
    return _Structure(own, ends, found)


def _ends(profile: Profile, several: Sequence[bool], collectives: Iterable[int]) -> frozenset[int]:
    """Ops that wait for several transfers, take next to no time, and that only such ops wait for."""
    limit = END * profile.compute_seconds
    result = {p for p, op in enumerate(profile.ops) if several[p] and op.seconds <= limit} - set(collectives)
    for position in reversed(range(len(profile.ops))):
        if position not in result:
            result.difference_update(profile.ops[position].inputs)
    return frozenset(result)


def _bits(mask: int) -> list[int]:
    return [k for k in range(mask.bit_length()) if mask >> k & 1]


def _retimed(profile: Profile, names: Sequence[str]) -> Profile:
    if profile.deferred:
        raise InputError("profile: transfers of this step are deferred already")
    structure, number = _structure(profile), {t.name: k for k, t in enumerate(profile.transfers)}
    for name in names:
        if name not in number:
            raise InputError(f"plan: {name!r} is not a gradient of this step, so it cannot be deferred")
        if name in structure.obstacles:
            raise InputError(f"plan: {name!r} cannot be deferred: {structure.obstacles[name]}")
    numbers = {number[name] for name in names}
    owner = [k if k in numbers else -1 for k in structure.own]
    inputs, uses = _inputs(profile, owner, numbers), first_uses(profile)
    use = [uses[t.name] for t in profile.transfers]
    head = sorted((p for p, k in enumerate(owner) if k >= 0), key=lambda p: (use[owner[p]], p))
    old = [*head, *(p for p, k in enumerate(owner) if k < 0)]
    place = {position: k for k, position in enumerate(old)}
    ops = tuple(_moved(profile.ops[p], owner[p] >= 0, sorted(place[i] for i in inputs[p])) for p in old)
    transfers = [
        replace(t, op=place[t.op], readers=tuple(sorted(place[r] for r in t.readers if owner[r] < 0)))
        for t in profile.transfers
    ]
    transfers.sort(key=lambda t: (t.op, t.name))
    # As traced all updates may wait for all transfers; in the retimed step they cannot.
    return replace(profile, ops=ops, transfers=tuple(transfers), deferred=tuple(names), tied=False)


def _moved(op: Op, to_the_head: bool, inputs: Sequence[int]) -> Op:
    return Op(op.name, op.seconds, tuple(inputs), 0.0 if to_the_head else op.start, op.gate)


def _inputs(profile: Profile, owner: Sequence[int], deferred: Iterable[int]) -> list[set[int]]:
    """Of each op the old positions of what it waits for in the retimed step.  owner: of each op the deferred transfer
    that it moves with, or -1."""
    collectives = {profile.transfers[k].op for k in deferred}
    inputs = [
        set() if p in collectives else {i for i in op.inputs if owner[i] == owner[p]}
        for p, op in enumerate(profile.ops)
    ]
    followed = {i for p, before in enumerate(inputs) if owner[p] >= 0 for i in before}
    last: dict[int, list[int]] = {k: [] for k in deferred}  # of its updates
    for p, k in enumerate(owner):
        if k >= 0 and p not in followed:
            last[k].append(p)
    for k in deferred:
        for r in profile.transfers[k].readers:
            if owner[r] < 0:
                inputs[r].update(last[k])
    return inputs
