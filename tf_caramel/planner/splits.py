"""Which transfers to defer: a few families of sets, and what a local search finds beside them, judged by the simulator.

Members in, the best sets out. The number of judgements is fixed, so that the search ends the same on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from tf_caramel.planner.profile import Network

Names: TypeAlias = tuple[str, ...]
Set: TypeAlias = frozenset[int]

COARSE, FINE = 8, 64  # parts of the bytes: of the first look, and the smallest steps of the second
ROUNDED = 9  # decimal places of seconds


@dataclass(frozen=True)
class Member:
    """A transfer that can be deferred.  ready: when its gradient is there, if nothing is deferred.  due: when the
    forward pass comes to its parameter, if nothing holds it up. Both in seconds."""

    name: str
    bytes_: int
    ready: float
    due: float


class Splits:
    """Sets of members, by their positions in order of readiness.

    judge: seconds of the step in which these are deferred.  most: judgements at all. Of steps that take equally long
    the one that keeps fewer bytes from step to step is better.
    """

    def __init__(self, members: Sequence[Member], network: Network, judge: Callable[[Names], float], most: int):
        self._members = sorted(members, key=lambda m: (m.ready, m.name))
        self._by_use = sorted(range(len(members)), key=lambda k: (self._members[k].due, self._members[k].name))
        self._sums = [0, *accumulate(m.bytes_ for m in self._members)]
        self._network, self._judge, self._most = network, judge, most
        self._seen: dict[Set, tuple[float, int, list[int]]] = {}

    def best(self, count: int) -> list[Names]:
        families = (self._paced, self._last_ready, self._first_ready, self._spread)
        grid = {(family, k * FINE // COARSE) for family in range(len(families)) for k in range(1, COARSE + 1)}
        grid.add((0, 0))
        self._rate(frozenset(range(len(self._members))))
        for family, share in sorted(grid, key=lambda g: (g[1] * COARSE // FINE % 2, g)):  # every other one first
            self._rate(families[family](share))
        self._refine(families)
        self._climb()
        ranked = sorted(self._seen, key=self._seen.__getitem__)
        return [tuple(sorted(self._members[k].name for k in chosen)) for chosen in ranked[:count]]

    def _rate(self, chosen: Set) -> bool:
        """Judges a set unless the judgements are spent; whether it is the best so far."""
        if not chosen or chosen in self._seen or len(self._seen) >= self._most:
            return False
        seconds = round(self._judge(tuple(sorted(self._members[k].name for k in chosen))), ROUNDED)
        rating = (seconds, sum(self._members[k].bytes_ for k in chosen), sorted(chosen))
        better = all(rating < other for other in self._seen.values())
        self._seen[chosen] = rating
        return better

    def _paced(self, share: int) -> Set:
        """In order of use all that arrives, one after the other, no later than it is due and a share of all travel."""
        late = self._network.seconds_per_byte * self._sums[-1] * (share / FINE) ** 2
        clock, chosen = self._network.start_up_seconds, set()
        for k in self._by_use:
            travel = self._network.seconds_per_byte * self._members[k].bytes_
            if clock + travel <= self._members[k].due + late:
                clock += travel
                chosen.add(k)
        return frozenset(chosen)

    def _last_ready(self, share: int) -> Set:
        """What would still be queued when the backward pass ends."""
        return frozenset(range(self._cut(1 - share / FINE), len(self._members)))

    def _first_ready(self, share: int) -> Set:
        """What the forward pass comes to last."""
        return frozenset(range(self._cut(share / FINE)))

    def _spread(self, share: int) -> Set:
        """A share of the bytes, from everywhere: both passes find something to send at any time."""
        wanted, chosen = 0.0, set()
        for k in self._by_use:
            wanted += self._members[k].bytes_ * share / FINE
            if wanted >= self._members[k].bytes_:
                wanted -= self._members[k].bytes_
                chosen.add(k)
        return frozenset(chosen)

    def _cut(self, share: float) -> int:
        """How many first members make up about this share of the bytes."""
        wanted = self._sums[-1] * share
        return min(range(len(self._sums)), key=lambda n: (abs(self._sums[n] - wanted), n))

    def _refine(self, families: Sequence[Callable[[int], Set]]) -> None:
        """Bisection within the family of the best set."""
        best = min(self._seen, key=self._seen.__getitem__)
        found = [(f, s) for s in range(0, FINE + 1, FINE // COARSE) for f in families if f(s) == best]
        if not found:
            return
        (family, share), step = found[0], FINE // COARSE
        while step > 1:
            step //= 2
            for other in (share - step, share + step):
                if 0 <= other <= FINE and self._rate(family(other)):
                    share = other

    def _climb(self) -> None:
        """Takes the first neighbour that is better, until none is or the judgements are spent."""
        better = True
        while better and len(self._seen) < self._most:
            best = min(self._seen, key=self._seen.__getitem__)
            better = any(self._rate(best ^ some) for some in self._neighbours(best))

    def _neighbours(self, best: Set) -> Iterator[Set]:
        """What changes sides: the first that the forward pass comes to, then ever smaller parts of the order of
        readiness, if all of a part are on one side."""
        size = 1
        while size <= len(self._by_use):
            yield frozenset(self._by_use[:size])
            size *= 2
        for parts in (COARSE, 2 * COARSE, 4 * COARSE, FINE):
            cuts = [self._cut(k / parts) for k in range(parts + 1)]
            for a, b in zip(cuts, cuts[1:], strict=False):
                some = frozenset(range(a, b))
                if some <= best or not some & best:
                    yield some
