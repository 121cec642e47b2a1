"""Caramel's compute order: gradients as jobs of a flow shop with two machines, first compute, then the network.

Johnson's rule (1954) on (P, M): what a gradient still has to compute, and what its transfer takes. Gradients share
ancestors, so P is counted anew after each pick, and what all of them need does not count: it has to run anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tf_caramel.planner.profile import Profile
from tf_caramel.planner.structure import levels, needs, ticks

DONE = 2**61  # ticks: later than anything
WORTH_AN_EDGE = 1e-5  # of the step's compute: holding back less than this costs the executor as much as it brings


def johnson(profile: Profile, keep_busy: bool) -> tuple[list[int], bool]:
    """Transfers of level 0, by their positions, in the order in which their gradients should be computed; and whether
    the link would run dry somewhere although another gradient could be ready earlier.

    Johnson: those with P <= M first, least P first; then those with the greatest M; equal ones by position.
    keep_busy: where the link would run dry before that pick is ready, the one that is ready earliest comes instead.
    """
    level, graph = levels(profile), needs(profile)
    count = sum(not level[t.op] for t in profile.transfers)
    m = np.array(
        [-DONE if level[t.op] else ticks(profile.network.seconds(t.bytes_)) for t in profile.transfers], np.int64
    )
    p = graph.ticks @ graph.matrix  # what is not scheduled yet
    p[m < 0] = DONE
    of_transfer = np.ascontiguousarray(graph.matrix.T)
    users = graph.matrix.sum(axis=1)  # of a row not scheduled yet, all are outstanding
    unscheduled = graph.ticks.copy()
    computed = link = 0
    ran_dry = False
    result: list[int] = []
    for outstanding in range(count, 0, -1):
        common = int(unscheduled[users == outstanding].sum())
        own = p - common
        pick = int(np.where(own <= m, own - DONE, -m).argmin())
        if computed + common + own[pick] > link:
            earliest = int(own.argmin())
            ran_dry |= earliest != pick
            pick = earliest if keep_busy else pick
        computed += common + int(own[pick])
        link = max(link, computed) + int(m[pick])
        rows = np.flatnonzero(of_transfer[pick] & (unscheduled > 0))
        p -= unscheduled[rows] @ graph.matrix[rows]
        unscheduled[rows] = 0
        p[pick], m[pick] = DONE, -DONE
        result.append(pick)
    return result, ran_dry


def edges(profile: Profile, picks: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """The fewest edges that compute gradients in the order of `picks`: one for each op that would run while an earlier
    gradient is not done, and that nothing held back already keeps from it; it waits for the gradient picked before its
    own.

    Runs the step as seen, one op at a time. Only ops with `gate` wait; where none can, the op runs when it would
    anyway. Every edge leads from an earlier gradient to a later one's own ancestor, so none closes a circle.
    """
    block, last = _blocks(profile, picks)
    seen = [b for b in block if b >= 0]
    if all(a <= b for a, b in pairwise(seen)):
        return ()
    least = WORTH_AN_EDGE * profile.compute_seconds
    left, waiting = [0] * (len(last) + 1), [0] * len(profile.ops)
    consumers: list[list[int]] = [[] for _ in profile.ops]
    for position, op in enumerate(profile.ops):
        if block[position] >= 0:
            left[block[position]] += 1
            waiting[position] = len(op.inputs)
            for i in op.inputs:
                consumers[i].append(position)
    ready = [p for p, n in enumerate(waiting) if not n and block[p] >= 0]
    running = [True] * len(last)  # the last op of each block has not run yet
    held: dict[int, list[int]] = {}
    result, current = [], 0
    while ready:
        position = heapq.heappop(ready)
        mine, op = block[position], profile.ops[position]
        if mine > current and op.gate and op.seconds >= least:
            source = next((last[b] for b in range(mine - 1, current - 1, -1) if running[b]), None)
            if source is not None:
                held.setdefault(source, []).append(position)
                result.append((profile.ops[source].name, op.name))
                continue
        left[mine] -= 1
        while current < len(last) and not left[current]:
            current += 1
        if mine < len(last) and position == last[mine]:
            running[mine] = False
        for c in consumers[position]:
            waiting[c] -= 1
            if not waiting[c] and block[c] >= 0:
                heapq.heappush(ready, c)
        for c in held.pop(position, ()):
            heapq.heappush(ready, c)
    return tuple(result)


def _blocks(profile: Profile, picks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each op the block it belongs to: the first pick that needs it (picks that need nothing new have no block), one
    more for what no gradient needs, -1 for what waits for a transfer.  Of each pick's block its last op: a producer of
    the gradient, because anything else in the block comes before one."""
    level, graph = levels(profile), needs(profile)
    of_row = np.full(len(graph.ticks), -1)
    of_transfer = np.ascontiguousarray(graph.matrix.T)
    count = 0
    for pick in picks:
        new = of_transfer[pick] & (of_row < 0)
        if new.any():
            of_row[new] = count
            count += 1
    collectives = {t.op for t in profile.transfers}
    rest = [-1 if level[p] or p in collectives else count for p in range(len(profile.ops))]
    block = [int(of_row[row]) if row >= 0 else rest[p] for p, row in enumerate(graph.group)]
    last = [-1] * count
    for position, b in enumerate(block):
        if 0 <= b < count:
            last[b] = position
    return block, last
