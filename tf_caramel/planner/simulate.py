"""One discrete-event simulator: runs a plan on a profile and says how long the step takes and where the time goes.

Compute is list scheduling on the streams of each rank (profile order is priority), the network is one FIFO per rank and
carries one message at a time, and both share the cores (`events`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tf_caramel.planner.defer import retime
from tf_caramel.planner.events import Graph, Log, Run, graph_of
from tf_caramel.planner.plan import BodyPlan, Plan, check
from tf_caramel.planner.profile import InputError, Network, Profile
from tf_caramel.planner.queues import AsItComes, Planned, Unit

FUSION_BYTES = 128 * 2**20  # Horovod's HOROVOD_FUSION_THRESHOLD as it comes
CYCLE_SECONDS = 0.001  # and its HOROVOD_CYCLE_TIME


@dataclass(frozen=True)
class Message:
    """One message of a simulated step. Times in seconds from the beginning of the step.

    pieces: as text.  ready: start boundary, all its gradients are there on the slowest rank.
    submitted: handed to the network (ready, in its turn, let in by the window).  start, end: it travels.
    needed: end boundary: the latest end that would not delay the step's end, all else in the order in which it ran and
    taking as long as it took.  deferred: it is of the step before, and its gradients were there from the start.
    """

    pieces: tuple[str, ...]
    bytes_: int
    ready: float
    submitted: float
    start: float
    end: float
    needed: float
    deferred: bool = False

    @property
    def slack(self) -> float:
        """Seconds by which it could have ended later without delaying the step's end; 0: the step waits for it."""
        return self.needed - self.end


@dataclass(frozen=True)
class Span:
    """An op on a compute stream of the slowest rank; ops of 0 seconds have none."""

    name: str
    stream: int
    start: float
    end: float


@dataclass(frozen=True)
class Outcome:
    """step_seconds: m.  compute_seconds: C, of the slowest rank: all its ops and joins of chunks, without what messages
    take of its cores.  communication_seconds: N, of its messages, each alone.
    exposed_seconds: communication during which the slowest rank computes nothing.
    efficiency: E = (U - m)/(U - L), U = C + N, L = max(C, N), with N the time of one message of all bytes, so that
    plans compare; None if there is nothing to hide.
    straggler_seconds: of the fastest rank: time in which its network stands still although the gradients of the next
    message are there, because those of the slowest are not. The wait at the end of the step is not in it.
    messages: in the order in which they travelled.  spans: only if they were asked for.
    deferred_bytes: of the gradients that are kept from one step to the next.
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    efficiency: float | None
    straggler_seconds: float
    messages: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    deferred_bytes: int = 0


def simulate(
    profile: Profile,
    plan: BodyPlan | None,
    *,
    network: Network | None = None,
    streams: int = 1,
    fusion_bytes: int = FUSION_BYTES,
    cycle_seconds: float = CYCLE_SECONDS,
    spans: bool = False,
    detail: bool = True,
) -> Outcome:
    """plan: None simulates Horovod as it comes, with its settings `fusion_bytes` and `cycle_seconds`. With a window a
    plan's batches are never fused; without one (0), Horovod does with them as it comes. Those deferred go one by one.
    If it defers batches, the retimed step is simulated (`defer`).

    network: instead of the profile's.  streams: ops that a rank computes at once.  detail: False leaves `messages`
    empty, trusts the plan in kinds and slices, and takes half the time.

    A chunked gradient is joined by one copy before anybody reads it; cutting it is free, slices share memory.
    Raises InputError if the plan does not fit the profile, or can never be carried out.
    """
    if streams < 1:
        raise InputError(f"streams: {streams}, but it must be 1 or more")
    network = network or profile.network
    if plan and plan.deferred and not profile.deferred:
        profile = retime(profile, plan.deferred_transfers)
    graph = graph_of(profile, plan.edges if plan else ())
    speeds = sorted(set(profile.speeds))
    pieces = [1] * len(graph.transfers)
    seconds, joins = graph.seconds, 0.0
    queue: AsItComes | Planned
    if plan is None:
        alone = [Unit((k,), t.bytes_, t.kind) for k, t in enumerate(graph.transfers)]
        queue = AsItComes(alone, len(alone), fusion_bytes, cycle_seconds)
    else:
        members, bytes_ = _batches(profile, graph, plan, pieces, thorough=detail)
        if plan.window:
            queue = Planned(members, bytes_, plan.window, len(pieces), plan.deferred)
        else:
            units = [Unit(m, b, graph.transfers[m[0]].kind) for m, b in zip(members, bytes_, strict=True)]
            queue = AsItComes(units, len(pieces), fusion_bytes, cycle_seconds, plan.deferred)
        chunked = [t for t, count in zip(graph.transfers, pieces, strict=True) if count > 1]
        if chunked:
            seconds = seconds.copy()
            for t in chunked:
                seconds[t.op] = network.copy_seconds_per_byte * t.bytes_
                joins += seconds[t.op]
    log = Log() if detail or spans else None
    tied = profile.tied and plan is None
    run = Run(
        graph,
        queue,
        network,
        profile.cores,
        speeds,
        seconds=seconds,
        pieces=pieces,
        streams=streams,
        tied=tied,
        log=log,
    )
    result = run.go()
    if result.never_ready:
        stuck = _some([graph.transfers[t].name for t in result.never_ready])
        raise InputError(f"plan: can never be carried out: each of {stuck} waits for a batch that waits for it")
    compute = (graph.compute_seconds + joins) * speeds[-1]
    return Outcome(
        step_seconds=result.step_seconds,
        compute_seconds=compute,
        communication_seconds=math.fsum(map(network.seconds, queue.bytes_)),
        exposed_seconds=result.exposed_seconds,
        efficiency=_efficiency(result.step_seconds, compute, network.seconds(profile.bytes_) if pieces else 0.0),
        straggler_seconds=result.straggler_seconds,
        messages=_messages(graph, plan, queue, log, result.step_seconds) if log and detail else (),
        spans=_spans(profile, log, len(speeds) - 1) if log and spans else (),
        deferred_bytes=sum(graph.transfers[graph.number[name]].bytes_ for name in profile.deferred),
    )


def _efficiency(step: float, compute: float, communication: float) -> float | None:
    """TicTac's scheduling efficiency (arXiv 1803.03288, equation 3) with two resources."""
    hideable = min(compute, communication)
    return (compute + communication - step) / hideable if hideable > 0 else None


def _batches(
    profile: Profile, graph: Graph, plan: BodyPlan, pieces: list[int], thorough: bool
) -> tuple[list[list[int]], list[int]]:
    """The transfers of the plan's batches as numbers, and their bytes; fills `pieces`, in how many each transfer
    travels. Raises InputError.

    thorough: check kinds and slices as well, which takes longer than the rest.
    """
    number = graph.number
    members = [[number.get(p.transfer, -1) for p in batch] for batch in plan.batches]
    for batch, inside in zip(plan.batches, members, strict=True):
        for p, t in zip(batch, inside, strict=True):
            if p.parts > 1 and t >= 0:
                pieces[t] = p.parts
    sent = Counter(t for batch in members for t in batch)
    if thorough or -1 in sent or any(sent[t] != count for t, count in enumerate(pieces)):
        check(Plan((plan,)), [{t.name: t.kind for t in profile.transfers}])
    if not all(members):
        raise InputError(f"plan: batches[{members.index([])}] holds no gradient")
    whole = [t.bytes_ for t in graph.transfers]
    bytes_ = [
        sum(whole[t] if p.parts == 1 else p.bytes_of(whole[t]) for p, t in zip(batch, inside, strict=True))
        for batch, inside in zip(plan.batches, members, strict=True)
    ]
    return members, bytes_


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def _spans(profile: Profile, log: Log, slowest: int) -> tuple[Span, ...]:
    of_slowest = [entry[1:] for entry in log.done if entry[0] == slowest and entry[2] >= 0]
    return tuple(
        Span(profile.ops[op].name, stream, start, end)
        for op, stream, start, end in sorted(of_slowest, key=lambda entry: (entry[2], entry[1]))
    )


def _messages(
    graph: Graph, plan: BodyPlan | None, queue: AsItComes | Planned, log: Log, step: float
) -> tuple[Message, ...]:
    needed = _end_boundaries(graph, queue, log, step)
    result = []
    for group, k, _, start, end in log.done:
        if group < 0:
            batches = queue.units[k] if isinstance(queue, AsItComes) else [k]
            names = [n for b in batches for n in (map(str, plan.batches[b]) if plan else [graph.transfers[b].name])]
            times = (queue.ready[k], queue.submitted[k], start, end, max(end, needed[k]))  # max: rounding
            deferred = plan is not None and max(batches) < plan.deferred
            result.append(Message(tuple(names), queue.bytes_[k], *times, deferred))
    return tuple(result)


def _end_boundaries(graph: Graph, queue: AsItComes | Planned, log: Log, step: float) -> dict[int, float]:
    """Of each message, the latest end that does not delay the step's end. One pass back over what ran.

    What follows an op: who waits for it, the messages of the gradients it completes, the next op on its stream. What
    follows a message: the next message (a window's edge never asks for more than that), the ops that wait for it.
    """
    carriers = defaultdict(list)  # of an op, if it is a collective: its messages
    for k, members in enumerate(queue.members):
        for t in members:
            carriers[graph.transfers[t].op].append(k)
    op_start: dict[tuple[int, int], float] = {}  # the latest, by group and op
    stream_start: dict[tuple[int, int], float] = {}  # of what comes next, by group and stream
    message_start: dict[int, float] = {}
    needed: dict[int, float] = {}
    groups = {entry[0] for entry in log.done} - {-1}
    next_start = step
    for group, what, stream, start, end in reversed(log.done):
        if group < 0:
            after = [op_start[g, graph.transfers[t].op] for g in groups for t in queue.members[what]]
            needed[what] = min(next_start, *after)
            next_start = message_start[what] = needed[what] - (end - start)
            continue
        after = [step]
        for consumer in graph.consumers[what]:
            if consumer in carriers:
                after += [message_start[k] for k in carriers[consumer]]
            else:
                after.append(op_start[group, consumer])
        if stream >= 0:
            after.append(stream_start.get((group, stream), step))
        op_start[group, what] = min(after) - (end - start)
        if stream >= 0:
            stream_start[group, stream] = op_start[group, what]
    return needed
