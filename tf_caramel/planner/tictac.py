"""TIC and TAC, TicTac's orders of transfers (Hashemi, Abdu Jyothi, Campbell; arXiv 1803.03288, sections 4.1 to 4.3).

A graph of ops of which some, the recvs, bring a parameter over the network: which of them should come first? Pure
functions; `recv_graph` makes such a graph of a profile, whose parameters are what the transfers of the step before have
updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_caramel.planner.profile import Profile
from tf_caramel.planner.structure import bit_matrix, levels, once_a_graph, ticks

NEVER = np.iinfo(np.int64).max  # M+ of a recv that no op needs together with another


@dataclass(frozen=True)
class Node:
    """An op: its seconds (of a recv: of its transfer) and the positions of the ops it waits for, all before its own."""

    seconds: float
    inputs: tuple[int, ...] = ()


class _Properties:
    """P, M and M+ of the outstanding recvs (section 4.1), kept up to date while recvs are taken away.

    Ops that depend on the same recvs are one row, so that a step is a few vector operations. Times are whole numbers.
    """

    def __init__(self, rows: Mapping[int, int], recv_ticks: Sequence[int]):
        self.m = np.array(recv_ticks, np.int64)
        self.outstanding = np.ones(len(self.m), np.bool_)
        self._needs = bit_matrix(rows, len(self.m))
        self._by_recv = np.ascontiguousarray(self._needs.T)
        self._load = np.array(list(rows.values()), np.int64)
        self._row_m = self._needs @ self.m
        self._count = self._needs.sum(axis=1)
        self.p = np.zeros(len(self.m), np.int64)
        self._belongs(np.flatnonzero(self._count == 1))

    def _belongs(self, rows: npt.NDArray[np.intp]) -> None:
        """Rows that depend on one outstanding recv alone add to its P."""
        if len(rows):
            np.add.at(self.p, (self._needs[rows] & self.outstanding).argmax(axis=1), self._load[rows])

    def remove(self, recv: int) -> None:
        self.outstanding[recv] = False
        rows = np.flatnonzero(self._by_recv[recv])
        self._row_m[rows] -= self.m[recv]
        self._count[rows] -= 1
        self._belongs(rows[self._count[rows] == 1])

    def m_plus(self, recv: int) -> int:
        """Least M of an op that needs `recv` and another outstanding one, or NEVER."""
        shared = self._row_m[self._by_recv[recv] & (self._count > 1)]
        return int(shared.min()) if len(shared) else NEVER

    def least_m_plus(self, recvs: npt.NDArray[np.intp]) -> int:
        """The first of `recvs` whose M+ is least."""
        if len(recvs) == 1:
            return int(recvs[0])
        shared = np.flatnonzero(self._by_recv[recvs].any(axis=0) & (self._count > 1))
        if not len(shared):
            return int(recvs[0])
        m = self._row_m[shared]
        least = self._needs[shared[m == m.min()]][:, recvs].any(axis=0)
        return int(recvs[least.argmax()])


def _rows(nodes: Sequence[Node], recvs: Sequence[int]) -> dict[int, int]:
    """Sets of recvs, as bits, on which ops depend -> sum of those ops' ticks."""
    number = {position: k for k, position in enumerate(recvs)}
    depends: list[int] = []
    rows: dict[int, int] = {}
    for position, node in enumerate(nodes):
        mine = 1 << number[position] if position in number else 0
        for i in node.inputs:
            mine |= depends[i]
        depends.append(mine)
        if position not in number and mine:
            rows[mine] = rows.get(mine, 0) + ticks(node.seconds)
    return rows


def tic(nodes: Sequence[Node], recvs: Sequence[int]) -> list[int]:
    """Of each of `recvs` (positions among `nodes`): M+ if every recv takes 1 and every op 0 (Algorithm 2), or NEVER.
    Less is more urgent; equal is equally urgent."""
    properties = _Properties(_rows(nodes, recvs), [1] * len(recvs))
    return [properties.m_plus(k) for k in range(len(recvs))]


def tac(nodes: Sequence[Node], recvs: Sequence[int]) -> list[int]:
    """The order of `recvs`, most urgent first, as indices into it (Algorithm 3 by its Equation 6).

    Equation 6 is Johnson's rule for two machines, but with M+ for ties the paper's comparison is not transitive: what
    it sorts depends on the order it is given. The key (0, M) if M <= P else (1, -P), then M+, then the position says
    the same and is a total order.
    """
    properties = _Properties(_rows(nodes, recvs), [ticks(nodes[r].seconds) for r in recvs])
    result = []
    for _ in recvs:
        left = np.flatnonzero(properties.outstanding)
        m, p = properties.m[left], properties.p[left]
        early = m <= p
        key = np.where(early, m, -p)
        if early.any():
            left, key = left[early], key[early]
        result.append(properties.least_m_plus(left[key == key.min()]))
        properties.remove(result[-1])
    return result


@once_a_graph
def _dependents(profile: Profile) -> tuple[tuple[int, ...], tuple[tuple[float, tuple[int, ...]], ...]]:
    """Transfers that have readers, and of each op that waits for no transfer (seconds, inputs) in a graph that begins
    with these transfers."""
    level = levels(profile)
    collectives = {t.op for t in profile.transfers}
    counted = [k for k, n in enumerate(level) if not n and k not in collectives]
    recvs = tuple(k for k, t in enumerate(profile.transfers) if any(not level[r] for r in t.readers))
    place = {position: len(recvs) + k for k, position in enumerate(counted)}
    inputs = {position: [place[i] for i in profile.ops[position].inputs if i in place] for position in counted}
    for number, k in enumerate(recvs):
        for reader in profile.transfers[k].readers:
            if reader in inputs:
                inputs[reader].append(number)
    return recvs, tuple((profile.ops[position].seconds, tuple(inputs[position])) for position in counted)


def recv_graph(profile: Profile) -> tuple[tuple[int, ...], list[Node]]:
    """The next step as TicTac sees it: (transfers that have readers, nodes), the nodes' first ones being these
    transfers.

    The readers of a parameter wait for its transfer; nothing waits for a gradient, and what waits for a collective of
    its own step (updates) does not count, nor does what is left of the step before.
    """
    recvs, ops = _dependents(profile)
    network, transfers = profile.network, profile.transfers
    nodes = [Node(network.seconds(transfers[k].bytes_)) for k in recvs]
    return recvs, nodes + [Node(seconds, inputs) for seconds, inputs in ops]
