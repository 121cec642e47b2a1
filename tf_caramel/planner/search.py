"""The adaptive batching: every plain batching and what a search finds beside them, judged by the simulator.

The search works on the compressed profile, with a number of simulations that is fixed and not a time, so that it ends
in the same plan on a busy machine. The last word has the profile itself: no plain batching is better on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tf_caramel.planner.batches import Batcher, Batches, fixed, mgwfbp
from tf_caramel.planner.moves import chunked, neighbours
from tf_caramel.planner.order import Item, Order, submission
from tf_caramel.planner.plan import BodyPlan, Piece
from tf_caramel.planner.profile import Network, Profile
from tf_caramel.planner.simulate import simulate

MB = 2**20
COMPRESSED = 0.03  # compressing a profile changes a step's time by less than this share
ROUNDED = 9  # decimal places of seconds: what differs by less is equal, and the plan with fewer messages wins

Judgement: TypeAlias = tuple[float, int, int, int]


@dataclass(frozen=True)
class Effort:
    """caps: of the fixed batchings tried (1 byte: every piece alone).  starts: batchings that a search starts from; 0:
    no search, and of the plain ones only the best is tried with every window and nothing is checked on the profile
    itself. work: ops and transfers that a search may simulate in all (from 60 to 400 simulations).
    """

    caps: tuple[int, ...]
    starts: int = 0
    work: int = 0

    def simulations(self, step: Profile) -> int:
        return min(400, max(60, self.work // (len(step.ops) + len(step.transfers))))

    def splits(self, step: Profile) -> int:
        """How many sets of deferred transfers are judged."""
        return max(20, self.simulations(step) // 3) if self.starts else 12

    def finals(self, step: Profile) -> int:
        """How many of them are looked into."""
        return 2 if self.starts and self.simulations(step) > 100 else 1


EFFORTS = {
    "full": Effort((1, *(k * MB for k in (1, 2, 4, 8, 16, 32, 64, 128))), starts=2, work=160_000),
    "quick": Effort((8 * MB, 32 * MB)),
}


@dataclass(frozen=True)
class Candidate:
    """order: its place among the orders tried; of equal plans the first is taken."""

    batches: Batches
    window: int
    order: int


@dataclass(frozen=True)
class Arena:
    """Where candidates meet. steps: of each order, the profile that it is judged on, with the order's edges in it."""

    steps: Sequence[Profile]
    network: Network
    seen: dict[tuple[int, int, Batches], Judgement]

    def judge(self, candidate: Candidate) -> Judgement:
        """(step seconds, messages, window, place of the order): less is better."""
        key = (candidate.order, candidate.window, candidate.batches)
        if key not in self.seen:
            plan = body_plan(candidate.batches, candidate.window)
            outcome = simulate(self.steps[candidate.order], plan, network=self.network, detail=False)
            seconds = round(outcome.step_seconds, ROUNDED)
            self.seen[key] = (seconds, len(candidate.batches), candidate.window, candidate.order)
        return self.seen[key]


def body_plan(batches: Batches, window: int, edges: tuple[tuple[str, str], ...] = ()) -> BodyPlan:
    """As a plan. A gradient's parts are numbered as they come: they are equal, and a search may have mixed them."""
    sent: Counter[str] = Counter()

    def numbered(piece: Piece) -> Piece:
        if piece.parts == 1:
            return piece
        sent[piece.transfer] += 1
        return replace(piece, part=sent[piece.transfer] - 1)

    deferred = sum(batch[0].level < 0 for batch in batches)
    return BodyPlan(tuple(tuple(numbered(item.piece) for item in batch) for batch in batches), window, edges, deferred)


def adaptive(
    profile: Profile, orders: Sequence[Order], steps: Sequence[Profile], windows: Sequence[int], effort: Effort
) -> BodyPlan:
    """The best plan found. steps: of each order, the compressed profile with the order's edges in it.

    If `effort` has starts, then on `profile` itself, as the simulator sees it, no plain batching with one of `orders`
    and `windows` is better (unless compressing it changed its time by more than COMPRESSED).
    """
    arena = Arena(steps, profile.network, {})
    plain: list[Candidate] = []
    horovod = {key: _messages(step, profile.network) for key, step in {id(step): step for step in steps}.items()}
    for number, items in _different([submission(profile, order) for order in orders], orders):
        for batches in _plain(items, horovod[id(steps[number])], profile.network, effort):
            plain += [Candidate(batches, window, number) for window in (windows if effort.starts else windows[-1:])]
    plain.sort(key=arena.judge)
    if not effort.starts:
        best = min((replace(plain[0], window=window) for window in windows), key=arena.judge)
    else:
        found = [_climb(arena, start, effort) for start in _starts(plain, effort.starts)]
        limit = arena.judge(plain[0])[0] * (1 + COMPRESSED)
        best = _last_word(profile, orders, [*found, *(c for c in plain if arena.judge(c)[0] <= limit)])
    return body_plan(best.batches, best.window, orders[best.order].edges)


def _different(sequences: Sequence[Sequence[Item]], orders: Sequence[Order]) -> list[tuple[int, Sequence[Item]]]:
    """Numbers and sequences of the orders, without those that submit and compute as an earlier one does."""
    first: dict[tuple[Any, ...], int] = {}
    for number, (items, order) in enumerate(zip(sequences, orders, strict=True)):
        first.setdefault((order.edges, *(item.piece for item in items)), number)
    return [(number, sequences[number]) for number in first.values()]


def _starts(plain: Sequence[Candidate], count: int) -> list[Candidate]:
    """The best candidates, no two of them with messages alike."""
    alike: dict[tuple[int, ...], Candidate] = {}
    for candidate in plain:
        alike.setdefault((candidate.order, *map(len, candidate.batches)), candidate)
    return list(alike.values())[:count]


def _plain(
    items: Sequence[Item], horovod: Sequence[Sequence[str]], network: Network, effort: Effort
) -> Iterator[Batches]:
    for cap in effort.caps:
        yield fixed(cap)(items, network)
    yield mgwfbp(items, network)
    if network.queued_seconds is not None:  # what a message costs if the link stays busy
        yield mgwfbp(items, replace(network, start_up_seconds=network.queued_seconds))
    of = {item.piece.transfer: item for item in items}
    parts = [(level, message) for message in horovod for level in sorted({of[name].level for name in message})]
    parts.sort(key=lambda part: part[0])
    yield tuple(tuple(of[name] for name in message if of[name].level == level) for level, message in parts)


def quick_batcher(network: Network) -> Batcher:
    """The one that says in a single simulation what a set of deferred transfers is worth."""
    start_up = network.start_up_seconds if network.queued_seconds is None else network.queued_seconds
    queued = replace(network, start_up_seconds=start_up)  # with deferral the link stays busy
    return lambda items, _: mgwfbp(items, queued)


def _messages(step: Profile, network: Network) -> list[tuple[str, ...]]:
    """What Horovod by itself would send together: whatever is ready when its network is free."""
    return [message.pieces for message in simulate(step, None, network=network).messages]


def _climb(arena: Arena, start: Candidate, effort: Effort) -> Candidate:
    """Local search: takes the first neighbour that is better, until none is or the simulations are spent."""
    cut = (replace(start, batches=batches) for batches in chunked(start.batches, arena.network))
    best = min([start, *cut], key=arena.judge)
    end = len(arena.seen) + effort.simulations(arena.steps[start.order])
    better: Candidate | None = best
    while better:
        better = None
        for batches in neighbours(best.batches):
            if len(arena.seen) >= end:
                break
            candidate = replace(best, batches=batches)
            if arena.judge(candidate) < arena.judge(best):
                best = better = candidate
                break
    return best


def _last_word(profile: Profile, orders: Sequence[Order], candidates: Sequence[Candidate]) -> Candidate:
    """The best of the candidates on the profile as it is."""

    def judge(candidate: Candidate) -> Judgement:
        plan = body_plan(candidate.batches, candidate.window, orders[candidate.order].edges)
        seconds = round(simulate(profile, plan, detail=False).step_seconds, ROUNDED)
        return seconds, len(candidate.batches), candidate.window, candidate.order

    return min(candidates, key=judge)
