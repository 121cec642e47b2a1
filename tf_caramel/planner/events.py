"""The clock of the simulator: ops on the streams of ranks, messages in one network, times exact between events.

In: a `Graph` (a profile's ops as integers, kept from run to run) and a queue that decides which message is next. Out:
the seconds of the step and, if asked for, a log of what ran when. Ops and transfers are positions in their profile.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tf_caramel.planner.profile import InputError, Network, Profile, Transfer
from tf_caramel.planner.queues import Queue
from tf_caramel.planner.structure import moved

Edges = tuple[tuple[str, str], ...]

INSTANT = 1e-12  # of the step's work: events closer than this are one instant, or rounding would decide what was first


@dataclass(frozen=True)
class Graph:
    """Of each op: seconds, waits (the number of ops it waits for), consumers (who waits for it), transfer_at (the
    transfer whose collective it is, or -1), free (it takes time and waits for no transfer but deferred ones: the
    forward and backward pass). By name: place (of an op), number (of a transfer).
    """

    seconds: list[float]
    waits: list[int]
    consumers: list[list[int]]
    transfer_at: list[int]
    free: list[bool]
    transfers: tuple[Transfer, ...]
    place: dict[str, int]
    number: dict[str, int]
    compute_seconds: float

    def with_edges(self, edges: Edges) -> Graph:
        """The same ops with more waiting. Raises InputError for an op that is missing and for ops in a circle."""
        waits, consumers = self.waits.copy(), [list(c) for c in self.consumers]
        backwards = False
        for before, after in edges:
            for name in (before, after):
                if name not in self.place:
                    raise InputError(f"plan: edges: {name!r} is not an op of this step")
            a, b = self.place[before], self.place[after]
            backwards |= a >= b
            waits[b] += 1
            consumers[a].append(b)
        if backwards and (circle := _circle(waits, consumers)):
            named = {self.place[name] for edge in edges for name in edge}
            names = ", ".join(list(self.place)[i] for i in circle if i in named)
            raise InputError(f"plan: edges: ops wait for each other in a circle: {names}")
        rest = (self.transfer_at, self.free, self.transfers, self.place, self.number, self.compute_seconds)
        return Graph(self.seconds, waits, consumers, *rest)


def _circle(waits: Sequence[int], consumers: Sequence[Sequence[int]]) -> list[int]:
    """Ops that wait for each other in a circle, each for the one before it; empty if there are none."""
    left = list(waits)
    free = [i for i, n in enumerate(left) if not n]
    for i in free:
        for j in consumers[i]:
            left[j] -= 1
            if not left[j]:
                free.append(j)
    stuck = {i for i, n in enumerate(left) if n}
    if not stuck:
        return []
    waits_for = {j: i for i in sorted(stuck) for j in consumers[i] if j in stuck}
    path: list[int] = []
    at = min(stuck)
    while at not in path:
        path.append(at)
        at = waits_for[at]
    return path[path.index(at) :][::-1]


_graphs: dict[int, tuple[weakref.ref[Profile], Graph, Edges, Graph]] = {}


def graph_of(profile: Profile, edges: Edges = ()) -> Graph:
    """Of a profile and a plan's edges; the profile's last one is kept as long as the profile lives.

    By identity: hashing a profile takes as long as a run. Raises InputError as `Graph.with_edges` does, and if a
    collective takes compute time, which would be counted beside its transfer's.
    """
    key = id(profile)
    kept = _graphs.get(key)
    if kept is None or kept[0]() is not profile:
        plain = _graph(profile)
        kept = (weakref.ref(profile, lambda _: _graphs.pop(key, None)), plain, (), plain)
        _graphs[key] = kept
    if kept[2] != edges:
        kept = (kept[0], kept[1], edges, kept[1].with_edges(edges))
        _graphs[key] = kept
    return kept[3]


def _graph(profile: Profile) -> Graph:
    consumers: list[list[int]] = [[] for _ in profile.ops]
    for i, op in enumerate(profile.ops):
        for j in op.inputs:
            consumers[j].append(i)
    transfer_at = [-1] * len(profile.ops)
    for number, transfer in enumerate(profile.transfers):
        op = profile.ops[transfer.op]
        if op.seconds:
            raise InputError(f"profile: transfer {transfer.name!r}: its op {op.name!r} must be an op of 0 seconds")
        transfer_at[transfer.op] = number
    held_up = [False] * len(profile.ops)  # it waits for a transfer, directly or not
    before = moved(profile)
    for i, op in enumerate(profile.ops):
        inputs = op.inputs if before[i] else [j for j in op.inputs if not before[j]]
        held_up[i] = any(held_up[j] or transfer_at[j] >= 0 for j in inputs)
    return Graph(
        seconds=[op.seconds for op in profile.ops],
        waits=[len(op.inputs) for op in profile.ops],
        consumers=consumers,
        transfer_at=transfer_at,
        free=[op.seconds > 0 and not held for op, held in zip(profile.ops, held_up, strict=True)],
        transfers=profile.transfers,
        place={op.name: i for i, op in enumerate(profile.ops)},
        number={t.name: i for i, t in enumerate(profile.transfers)},
        compute_seconds=profile.compute_seconds,
    )


@dataclass
class Log:
    """done: in order of completion (group, op, stream, start, end), with stream -1 if the op takes no time, or
    (-1, message, -1, start, end). Groups of equally fast ranks, the slowest last.
    """

    done: list[tuple[int, int, int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The first three: see `simulate.Outcome`.  never_ready: transfers that waited for ever."""

    step_seconds: float
    exposed_seconds: float
    straggler_seconds: float
    never_ready: list[int]


class _Group:
    """Ranks of equal speed. work: compute seconds that each of its streams has had so far; a running op ends when work
    reaches its end, so that a change of pace changes no op.  fresh: transfers whose inputs have just been done.
    """

    def __init__(self, number: int, graph: Graph, seconds: list[float], streams: int, log: Log | None):
        self.number, self.log = number, log
        self.consumers, self.transfer_at, self.seconds = graph.consumers, graph.transfer_at, seconds
        self.is_free, self.passes = graph.free, sum(graph.free)  # ops of the forward and backward pass still to be done
        self.waiting = graph.waits.copy()
        self.ready: list[int] = []
        self.running: list[tuple[float, int, int, float]] = []  # (work at its end, op, stream, when it started)
        self.free = list(range(streams))
        self.work = 0.0
        self.fresh: list[int] = []
        for op in [op for op, count in enumerate(self.waiting) if not count]:
            if self.transfer_at[op] >= 0:
                self.fresh.append(self.transfer_at[op])
            else:
                self.enter(op, 0.0)

    def enter(self, op: int, now: float) -> None:
        """Nothing holds the op back: it gets in line for a stream, or is done at once if it takes no time."""
        if self.seconds[op] > 0:
            heappush(self.ready, op)
        else:
            self._finish(op, -1, now, now)

    def _finish(self, op: int, stream: int, start: float, now: float) -> None:
        waiting, seconds, transfer_at, log = self.waiting, self.seconds, self.transfer_at, self.log
        done = [op]  # and the ops of 0 seconds that follow
        for op in done:
            if log:
                log.done.append((self.number, op, stream, start, now))
                stream, start = -1, now
            for consumer in self.consumers[op]:
                waiting[consumer] -= 1
                if waiting[consumer]:
                    continue
                if transfer_at[consumer] >= 0:
                    self.fresh.append(transfer_at[consumer])
                elif seconds[consumer] > 0:
                    heappush(self.ready, consumer)
                else:
                    done.append(consumer)

    def fire(self, now: float, instant: float) -> None:
        """Ends the ops whose work is done; free streams take the ready ops of the lowest positions."""
        running, ready, free = self.running, self.ready, self.free
        reached = self.work + instant
        while running and running[0][0] <= reached:
            _, op, stream, start = heappop(running)
            heappush(free, stream)
            self.passes -= self.is_free[op]
            self._finish(op, stream, start, now)
        while ready and free:
            op = heappop(ready)
            heappush(running, (self.work + self.seconds[op], op, heappop(free), now))


class Run:
    """One run. speeds: of the groups of ranks, the slowest last.  seconds: of each op, joins of chunks included.
    pieces: of each transfer, in how many pieces it travels.  tied: nobody gets one transfer before all have arrived.
    """

    def __init__(
        self,
        graph: Graph,
        queue: Queue,
        network: Network,
        cores: float,
        speeds: Sequence[float],
        *,
        seconds: list[float],
        pieces: list[int],
        streams: int,
        tied: bool,
        log: Log | None,
    ):
        self.tied = tied
        self.transfers, self.queue, self.network, self.cores, self.log = graph.transfers, queue, network, cores, log
        self.groups = [
            _Group(g, graph, seconds if speed == 1 else [speed * s for s in seconds], streams, log)
            for g, speed in enumerate(speeds)
        ]
        travel = sum(network.seconds(t.bytes_) for t in graph.transfers)
        self.instant = INSTANT * (speeds[-1] * sum(seconds) + travel)
        self.pieces = pieces.copy()
        self.missing = [len(speeds)] * len(pieces)  # groups on which a transfer is not ready yet
        self.own_ready = [0.0] * len(pieces)  # when it was ready on the fastest group
        self.now = 0.0
        self.message: int | None = None  # that travels
        self.started = self.left = 0.0  # when it started, its seconds to go
        self.freed = -math.inf  # when the one before it ended
        self.pace = self.shared = 1.0  # of compute while it travels; of the message while a rank computes
        self.exposed = self.straggler = 0.0

    def go(self) -> Result:
        groups, instant = self.groups, self.instant
        arrived = True
        while True:
            for group in groups:
                group.fire(self.now, instant)
                arrived |= bool(group.fresh)
            if arrived:
                self._hand_over()
            if not self._tick():
                break
            arrived = self.message is not None and self.left <= instant
            if arrived:
                self._arrive()
        never_ready = [transfer for transfer, groups in enumerate(self.missing) if groups]
        return Result(self.now, self.exposed, self.straggler, never_ready)

    def _tick(self) -> bool:
        """Moves the clock to the next event; False if there is none."""
        wait = math.inf  # in work at first
        for group in self.groups:
            if group.running and group.running[0][0] - group.work < wait:
                wait = group.running[0][0] - group.work
        if self.message is None:
            if wait == math.inf:
                return False
            work = wait
        else:
            rate = self.shared if wait < math.inf else 1.0
            wait = min(wait / self.pace, self.left / rate)
            work = wait * self.pace
            self.left -= wait * rate
            if not self.groups[-1].running:
                self.exposed += wait
        self.now += wait
        for group in self.groups:
            group.work += work
        return True

    def _hand_over(self) -> None:
        """What has become ready on all ranks goes to the queue; a free network takes the next message."""
        ready = []
        for group in self.groups:
            for transfer in group.fresh:
                self.missing[transfer] -= 1
                if not self.missing[transfer]:
                    ready.append(transfer)
                if not group.number:
                    self.own_ready[transfer] = self.now
            group.fresh.clear()
        if ready:
            ready.sort()
            self.queue.offer(ready, self.now)
        if self.message is None:
            self.message = self.queue.take(self.now)
            if self.message is not None:
                self._send(self.message)
        elif ready and self.queue.join(self.message, self.now):
            self._send(self.message)

    def _send(self, message: int) -> None:
        """A message and compute share the cores: it wants the share f = cpu_seconds / seconds of one core, and gets at
        most what a thread gets that competes with one thread a core, cores / (cores + 1); and it takes `stretch` times
        as long or more.
        """
        bytes_ = self.queue.bytes_[message]
        alone = self.network.seconds(bytes_, self.queue.submitted[message] < self.freed)
        busy = any(group.passes for group in self.groups)  # updates leave the cores room enough
        self.left = alone + (self.network.busy_start_up_seconds if busy else 0.0)
        self.started = self.now
        wanted = min(1.0, self.network.cpu_seconds(bytes_) / alone) if alone else 0.0
        given = min(wanted, self.cores / (self.cores + 1))
        self.shared = min(given / wanted if wanted else 1.0, 1 / self.network.stretch)
        self.pace = (self.cores - given) / self.cores

    def _arrive(self) -> None:
        message, self.message = self.message, None
        assert message is not None
        members = self.queue.members[message]
        if len(self.groups) > 1:
            own = max(self.own_ready[transfer] for transfer in members)
            self.straggler += max(0.0, self.started - max(own, self.freed))
        self.freed = self.now
        if self.log:
            self.log.done.append((-1, message, -1, self.started, self.now))
        for transfer in members:
            self.pieces[transfer] -= 1
        if self.tied:
            members = [] if any(self.pieces) else list(range(len(self.pieces)))
        for transfer in dict.fromkeys(members):  # once, if several pieces of it came
            if not self.pieces[transfer]:
                for group in self.groups:
                    group.enter(self.transfers[transfer].op, self.now)
