"""Which transfers to defer: intervals of the order in which gradients become ready, judged by the simulator.

A step in, the best intervals out. The backlog when the backward pass ends is at the end of that order; what the forward
pass reads late, and can wait for, at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

Names: TypeAlias = tuple[str, ...]
Judge: TypeAlias = Callable[[Names], float]

EIGHTHS = 8  # the grid that is tried first, in bytes
FINEST = 64
ROUNDED = 9  # decimal places of seconds


class Intervals:
    """Intervals of `names` (in order of readiness), by the positions of their first and past their last member.

    Of steps that take equally long the one that keeps fewer bytes from step to step is better.
    """

    def __init__(self, names: Sequence[str], bytes_: Sequence[int], judge: Judge, most: int):
        self.names, self.judge, self.most = names, judge, most
        self._sums = [0, *accumulate(bytes_)]
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}

    def best(self, count: int) -> list[Names]:
        """The best `count` of those that were tried, at most `most` of them."""
        for interval in self._grid():
            self._rate(interval)
        part = EIGHTHS
        while part < FINEST:
            part *= 2
            while self._step(part):
                pass
        ranked = sorted(self._seen, key=lambda interval: (self._seen[interval], interval))
        return [tuple(self.names[a:b]) for a, b in ranked[:count]]

    def _grid(self) -> Iterator[tuple[int, int]]:
        """All, then the ends of the order, then its beginnings."""
        n = len(self.names)
        cuts = [self._at(k, EIGHTHS) for k in range(1, EIGHTHS)]
        yield 0, n
        yield from ((cut, n) for cut in cuts)
        yield from ((0, cut) for cut in cuts)

    def _at(self, k: int, parts: int) -> int:
        """How many members make up about k/parts of the bytes."""
        wanted = self._sums[-1] * k / parts
        return min(range(len(self._sums)), key=lambda n: (abs(self._sums[n] - wanted), n))

    def _rate(self, interval: tuple[int, int]) -> None:
        a, b = interval
        if a < b and interval not in self._seen and len(self._seen) < self.most:
            seconds = round(self.judge(tuple(self.names[a:b])), ROUNDED)
            self._seen[interval] = (seconds, self._sums[b] - self._sums[a])

    def _step(self, parts: int) -> bool:
        """Moves either end of the best interval by one member and by bytes; whether one of these is better."""
        before = a, b = min(self._seen, key=lambda interval: (self._seen[interval], interval))
        for far in (1, None):
            for sign in (-1, 1):
                self._rate((a, self._moved(b, sign, far, parts)))
                self._rate((self._moved(a, sign, far, parts), b))
        return min(self._seen, key=lambda interval: (self._seen[interval], interval)) != before

    def _moved(self, position: int, sign: int, members: int | None, parts: int) -> int:
        if members is None:
            wanted = self._sums[position] + sign * self._sums[-1] / parts
            found = min(range(len(self._sums)), key=lambda n: (abs(self._sums[n] - wanted), n))
        else:
            found = position + sign * members
        return max(0, min(len(self.names), found))
