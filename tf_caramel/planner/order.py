"""Orders: which transfer is more urgent, what compute is made to wait, and the order in which gradients are submitted.

A policy (`fifo`, `tic`, `tac`, `caramel`) makes an Order of a profile; `submission` makes a sequence of gradients of
it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tf_caramel.planner import flowshop, tictac
from tf_caramel.planner.plan import Piece
from tf_caramel.planner.profile import Network, Profile
from tf_caramel.planner.structure import first_uses, levels, readiness


@dataclass(frozen=True)
class Order:
    """priority: of each transfer of the profile, by its position; less is more urgent, equal is decided by readiness.
    edges: names of (gradient's producer, op that is made to wait for it)."""

    priority: tuple[int, ...]
    edges: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Item:
    """A piece in a sequence; equal only to itself. ready: its start boundary, seconds.  priority: less is more urgent.
    group: pieces may share a message if their groups are equal; None: it travels alone and whole.
    level: how many transfers it waits for; pieces of one level come before all of the next. -1: deferred.
    due: of a deferred piece, when the forward pass would come to it if nothing held it up, seconds.
    """

    piece: Piece
    bytes_: int
    ready: float
    group: Hashable = "float32"
    priority: int = 0
    level: int = 0
    due: float = 0.0


def ranks(order: Sequence[int], count: int) -> list[int]:
    """Place of each of `count` things in `order`; those missing from it share the place after the last."""
    result = [len(order)] * count
    for rank, k in enumerate(order):
        result[k] = rank
    return result


def fifo(profile: Profile) -> Order:
    """As seen: by readiness."""
    return Order((0,) * len(profile.transfers))


def tic(profile: Profile) -> Order:
    """TicTac's order without times. Transfers that nobody reads in the next step's passes come last."""
    recvs, nodes = tictac.recv_graph(profile)
    priority = [tictac.NEVER + 1] * len(profile.transfers)
    for k, m_plus in zip(recvs, tictac.tic(nodes, range(len(recvs))), strict=True):
        priority[k] = m_plus
    return Order(tuple(priority))


def tac(profile: Profile) -> Order:
    """TicTac's order with times. Transfers that nobody reads in the next step's passes come last."""
    recvs, nodes = tictac.recv_graph(profile)
    order = [recvs[k] for k in tictac.tac(nodes, range(len(recvs)))]
    return Order(tuple(ranks(order, len(profile.transfers))))


def caramel(profile: Profile) -> Order:
    """Start boundaries as early as the flow shop of compute and network allows, with the edges that bring it about.

    Of Johnson's order and its variant that never lets the link run dry, the one whose last message would end first.
    """
    picks, ran_dry = flowshop.johnson(profile, keep_busy=False)
    found = []
    for order in [picks] + ([flowshop.johnson(profile, keep_busy=True)[0]] if ran_dry else []):
        made = Order(tuple(ranks(order, len(profile.transfers))), flowshop.edges(profile, order))
        found.append((last_end(submission(profile, made), profile.network), len(made.edges), made))
    return min(found, key=lambda f: f[:2])[2]


POLICIES: Mapping[str, Callable[[Profile], Order]] = {"fifo": fifo, "tic": tic, "tac": tac, "caramel": caramel}


def submission(profile: Profile, order: Order) -> tuple[Item, ...]:
    """The profile's gradients in the order in which they are submitted."""
    ready, dues = readiness(profile, order.edges), due(profile, profile.deferred)

    def item(k: int, level: int) -> Item:
        t = profile.transfers[k]
        group = None if t.kind is None else (level, t.kind)
        return Item(Piece(t.name), t.bytes_, ready[k], group, order.priority[k], level, dues.get(t.name, 0.0))

    level = levels(profile)
    items = [item(k, level[t.op]) for k, t in enumerate(profile.transfers)]
    return sequence(items, profile.network)


def due(profile: Profile, names: Collection[str]) -> dict[str, float]:
    """Of transfers, when the forward pass comes to their parameters if nothing holds it up, seconds."""
    if not names:
        return {}
    level, uses = levels(profile), first_uses(profile)
    clock = [0.0, *accumulate(0.0 if level[p] else op.seconds for p, op in enumerate(profile.ops))]
    return {name: clock[uses[name]] for name in names}


def sequence(items: Sequence[Item], network: Network) -> tuple[Item, ...]:
    """List scheduling on the link: whenever it is free, the most urgent of what is ready goes; it never idles on
    purpose.

    Equally urgent ones go by readiness, then as given. Levels go one after the other: what waits for other transfers
    may be ready sooner, but submitted before them it would wait for ever.
    """
    coming = sorted(range(len(items)), key=lambda k: (items[k].level, items[k].ready, k), reverse=True)
    waiting: list[tuple[int, float, int]] = []
    result: list[Item] = []
    clock, level = 0.0, 0
    while coming or waiting:
        if not waiting:
            level = items[coming[-1]].level
            clock = max(clock, items[coming[-1]].ready)
        while coming and items[coming[-1]].level == level and items[coming[-1]].ready <= clock:
            k = coming.pop()
            heapq.heappush(waiting, (items[k].priority, items[k].ready, k))
        result.append(items[heapq.heappop(waiting)[2]])
        clock += network.seconds(result[-1].bytes_)
    return tuple(result)


def last_end(items: Sequence[Item], network: Network) -> float:
    """When the last of `items` arrives if each is a message: they travel one after the other, none before it is
    ready."""
    clock = 0.0
    for item in items:
        clock = max(clock, item.ready) + network.seconds(item.bytes_)
    return clock
