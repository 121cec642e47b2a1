"""A profile with fewer ops, for a search that simulates many plans: ops that run one after the other become one.

With one stream per rank the ops that wait for no transfer run in one order, whatever the plan: the chain. Pieces of the
chain become ops. Ops that wait for transfers are merged where they wait for the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate

from tf_caramel.planner.events import Edges, Graph, graph_of
from tf_caramel.planner.profile import Op, Profile, Transfer


@dataclass
class _Unit:
    """What becomes one op. place: sorts it among the others.  needs: the units that it waits for."""

    place: tuple[int, int, int]
    members: list[int]
    needs: set[int] = field(default_factory=set)
    seconds: float = 0.0


def compress(profile: Profile, edges: Edges = (), grain: float = 0.002) -> Profile:
    """The same step in fewer ops, as one stream runs it under a plan with these edges (which are in the result).

    grain: merged ops are no longer than this share of the step's compute seconds; a transfer may become ready later by
    as much. An op has the name of the last op in it. Ops of 0 seconds are left out, unless that makes more to wait
    for. Transfers keep names, bytes and kinds; their readers are the ops in which those are that read first and take
    time. Raises InputError as `simulate` does for edges.
    """
    graph = graph_of(profile, edges)
    order = _executed(graph)
    limit = grain * graph.compute_seconds
    inputs: list[list[int]] = [[] for _ in order]
    for op in order:
        for consumer in graph.consumers[op]:
            inputs[consumer].append(op)
    awaited = [0] * len(order)  # transfers that an op waits for, as bits
    for op in order:
        for i in inputs[op]:
            awaited[op] |= awaited[i] | (1 << graph.transfer_at[i] if graph.transfer_at[i] >= 0 else 0)
    units = _chain(graph, [op for op in order if graph.seconds[op] > 0 and not awaited[op]], limit)
    _add_the_rest(units, graph, order, inputs, awaited, limit)
    return _profile(profile, graph, awaited, units)


def _executed(graph: Graph) -> list[int]:
    """The ops in the order in which one stream executes them if every transfer arrives at once."""
    waits = graph.waits.copy()
    ready = [(graph.seconds[op] > 0, op) for op, count in enumerate(waits) if not count]
    heapify(ready)
    order = []
    while ready:
        _, op = heappop(ready)
        order.append(op)
        for consumer in graph.consumers[op]:
            waits[consumer] -= 1
            if not waits[consumer]:
                heappush(ready, (graph.seconds[consumer] > 0, consumer))
    return order


def _chain(graph: Graph, chain: Sequence[int], limit: float) -> list[_Unit]:
    units: list[_Unit] = []
    for op in chain:
        if not units or units[-1].seconds + graph.seconds[op] > limit:
            units.append(_Unit((len(units), 1, 0), [], {len(units) - 1} if units else set()))
        units[-1].members.append(op)
        units[-1].seconds += graph.seconds[op]
    return units


def _add_the_rest(
    units: list[_Unit],
    graph: Graph,
    order: Sequence[int],
    inputs: Sequence[Sequence[int]],
    awaited: Sequence[int],
    limit: float,
) -> None:
    """Collectives, each a unit, and the ops that wait for transfers.

    Such ops share a unit if they wait for the same transfers and have their turn after the same part of the chain
    (`turn`: how many parts are before it). Both only grow from an op to those that wait for it, so units cannot wait
    for each other in a circle.
    """
    chain = len(units)
    # An op has its turn before a part of the chain if it stands before all the ops of that part and of those after it.
    lowest = list(accumulate((min(unit.members) for unit in reversed(units)), min))[::-1]
    stands_for = {op: {number} for number, unit in enumerate(units) for op in unit.members}
    turn = [max(stands_for.get(op, {-1})) + 1 for op in range(len(order))]
    feeds = _feeds_a_collective(graph, order)
    filling: dict[tuple[int, int], int] = {}
    for op in order:
        if op in stands_for:
            continue
        needs = set().union(*(stands_for[i] for i in inputs[op]))
        needs -= set(sorted(n for n in needs if n < chain)[:-1])  # the chain's last includes the others
        turn[op] = max((turn[i] for i in inputs[op]), default=0)
        is_collective = graph.transfer_at[op] >= 0
        spread = len(needs) * len(graph.consumers[op]) > len(needs) + len(graph.consumers[op])
        if not is_collective and not graph.seconds[op] and not spread:
            stands_for[op] = needs
            continue
        turn[op] = max(turn[op], bisect_right(lowest, op))
        alike = (awaited[op], turn[op])
        number = len(units) if is_collective else filling.get(alike, len(units))
        if number < len(units) and units[number].seconds + graph.seconds[op] > limit:
            number = len(units)
        if number == len(units):
            units.append(_Unit((turn[op], 0, op), []))
        unit = units[number]
        unit.members.append(op)
        unit.seconds += graph.seconds[op]
        unit.needs |= needs - {number}
        stands_for[op] = {number}
        if not is_collective:
            filling[alike] = number
            if feeds[op]:  # a transfer that waits for a transfer: delays would add up from one to the next
                del filling[alike]


def _feeds_a_collective(graph: Graph, order: Sequence[int]) -> list[bool]:
    """Of each op, whether a collective waits for it, directly or through ops of 0 seconds."""
    feeds = [False] * len(order)
    for op in reversed(order):
        feeds[op] = any(graph.transfer_at[c] >= 0 or (not graph.seconds[c] and feeds[c]) for c in graph.consumers[op])
    return feeds


def _profile(profile: Profile, graph: Graph, awaited: Sequence[int], units: Sequence[_Unit]) -> Profile:
    """The units as ops, in the order of their places as far as inputs allow."""
    waits = [len(unit.needs) for unit in units]
    consumers: list[list[int]] = [[] for _ in units]
    for number, unit in enumerate(units):
        for need in unit.needs:
            consumers[need].append(number)
    ready = [(unit.place, number) for number, unit in enumerate(units) if not waits[number]]
    heapify(ready)
    position: dict[int, int] = {}  # of a unit
    while ready:
        _, number = heappop(ready)
        position[number] = len(position)
        for consumer in consumers[number]:
            waits[consumer] -= 1
            if not waits[consumer]:
                heappush(ready, (units[consumer].place, consumer))
    ops: list[Op] = []
    at: dict[int, int] = {}  # position of the unit that ends with an op
    for number in position:
        members = [profile.ops[op] for op in units[number].members]
        seconds = math.fsum(op.seconds for op in members)
        at[units[number].members[-1]] = len(ops)
        inputs = tuple(sorted(position[n] for n in units[number].needs))
        ops.append(Op(members[-1].name, seconds, inputs, members[0].start, members[-1].gate))
    inside = {op: position[number] for number, unit in enumerate(units) for op in unit.members}
    transfers = (replace(t, op=at[t.op], readers=_readers(t, graph, awaited, inside)) for t in profile.transfers)
    return replace(profile, ops=tuple(ops), transfers=tuple(sorted(transfers, key=lambda t: (t.op, t.name))))


def _readers(transfer: Transfer, graph: Graph, awaited: Sequence[int], inside: Mapping[int, int]) -> tuple[int, ...]:
    """The new ops that read: where a reader was left out, those with what waits for it and for no transfer."""
    seen = list(transfer.readers)
    known = set(seen)
    for op in seen:
        if op not in inside:
            new = [c for c in graph.consumers[op] if c not in known and not awaited[c]]
            known.update(new)
            seen += new
    return tuple(sorted({inside[op] for op in seen if op in inside} - {inside[transfer.op]}))
