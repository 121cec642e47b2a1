"""What is drawn of a simulated step: phases of ops, ops merged to what an eye can tell apart, exposed communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tf_caramel.planner.defer import retime
from tf_caramel.planner.plan import Piece
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.simulate import Outcome, Span

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True)
class Block:
    """Neighbouring ops of one phase on one stream, `count` of them; `name` is the longest one's. Times in seconds."""

    name: str
    count: int
    phase: str
    stream: int
    start: float
    end: float


def phases(profile: Profile) -> dict[str, str]:
    """Op name -> phase. A guess from the graph, for colours only.

    update: waits for a transfer, at any distance; of the rest, backward: is called a gradient, as TensorFlow calls the
    ops of its tapes; update, too: no transfer waits for it (metrics are such); forward: comes before the first gradient
    is made; backward: the rest.
    """
    after = {t.op for t in profile.transfers}
    before = {i for c in after for i in profile.ops[c].inputs}
    first = min(before, default=len(profile.ops))
    for k, op in enumerate(profile.ops):
        if not after.isdisjoint(op.inputs):
            after.add(k)
    for k in range(len(profile.ops) - 1, -1, -1):
        if k in before:
            before.update(profile.ops[k].inputs)

    def phase(k: int, name: str) -> str:
        if k in after:
            return UPDATE
        if "gradient" in name:
            return BACKWARD
        if k not in before:
            return UPDATE
        return FORWARD if k < first else BACKWARD

    return {op.name: phase(k, op.name) for k, op in enumerate(profile.ops)}


def blocks(spans: Iterable[Span], phase_of: Mapping[str, str], limit: int = 6000) -> list[Block]:
    """Ops as at most `limit` blocks a stream: what is thinner than the step's 16,000th part is merged with thin
    neighbours of its phase, and if that leaves too many, more coarsely. Ops that take no time are left out.
    """
    shown = sorted((s for s in spans if s.end > s.start), key=lambda s: (s.stream, s.start, s.end, s.name))
    if not shown:
        return []
    limit *= 1 + shown[-1].stream
    thin = max(s.end for s in shown) / 16000
    while len(result := _merge(shown, phase_of, thin)) > limit:
        thin *= 2
    return result


def _merge(spans: Sequence[Span], phase_of: Mapping[str, str], thin: float) -> list[Block]:
    result: list[Block] = []
    longest = 0.0  # op of the block that is being made
    for span in spans:
        took, phase = span.end - span.start, phase_of[span.name]
        last = result[-1] if result else None
        if (
            last is not None
            and (last.stream, last.phase) == (span.stream, phase)
            and max(took, last.end - last.start, span.start - last.end) < thin
        ):
            name = span.name if took > longest else last.name
            longest = max(longest, took)
            result[-1] = Block(name, last.count + 1, phase, span.stream, last.start, max(last.end, span.end))
        else:
            longest = took
            result.append(Block(span.name, 1, phase, span.stream, span.start, span.end))
    return result


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same instants as disjoint intervals in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def without(
    intervals: Iterable[tuple[float, float]], taken: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The instants of `intervals` that are in none of `taken`: of messages and spans, the exposed communication."""
    holes = union(taken)
    result = []
    first = 0  # holes before it end before the interval begins
    for start, end in union(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = start
        for k in range(first, len(holes)):
            if holes[k][0] >= end:
                break
            if holes[k][0] > at:
                result.append((at, holes[k][0]))
            at = max(at, holes[k][1])
        if at < end:
            result.append((at, end))
    return result


def lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """For each of these intervals, in order of their starts, the first lane in which it overlaps none before it."""
    ends: list[float] = []
    result = []
    for start, end in intervals:
        lane = next((k for k, busy in enumerate(ends) if busy <= start), len(ends))
        ends[lane : lane + 1] = [end]
        result.append(lane)
    return result


def made_by(profile: Profile) -> dict[str, str]:
    """Transfer -> the op that makes its gradient: TensorFlow names that one after the layer."""
    inputs = {t.name: profile.ops[t.op].inputs for t in profile.transfers}
    return {name: profile.ops[max(of)].name if of else name for name, of in inputs.items()}


def ready_times(profile: Profile, outcome: Outcome) -> dict[str, float]:
    """Transfer -> start boundary, when its own gradient is there, in a step that was simulated with its spans; of a
    deferred one, 0."""
    pieces = [Piece.parse(piece) for message in outcome.messages if message.deferred for piece in message.pieces]
    profile = retime(profile, {piece.transfer for piece in pieces})
    ended = {span.name: span.end for span in outcome.spans}
    arrived: dict[str, float] = {}
    for message in outcome.messages:
        for piece in message.pieces:
            name = Piece.parse(piece).transfer
            arrived[name] = max(arrived.get(name, 0.0), message.end)
    transfer_at = {t.op: t.name for t in profile.transfers}
    done: list[float] = []  # of each op; one that takes no time is done when its inputs are
    ready = {}
    for k, op in enumerate(profile.ops):
        inputs = max((done[i] for i in op.inputs), default=0.0)
        if k in transfer_at:
            ready[transfer_at[k]] = inputs
            inputs = arrived[transfer_at[k]]
        done.append(ended.get(op.name, inputs))
    return ready
