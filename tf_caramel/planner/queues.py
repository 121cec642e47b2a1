"""Which message is next: as a plan says, or as Horovod does by itself. Transfers, units, messages are numbers here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Queue(Protocol):
    """Which message is next. Messages are numbers; of each: its transfers, bytes, when it was ready and submitted."""

    members: list[list[int]]
    bytes_: list[int]
    ready: list[float]
    submitted: list[float]

    def offer(self, transfers: list[int], now: float) -> None:
        """These became ready."""

    def take(self, now: float) -> int | None:
        """The network is free: the message that starts now, if there is one."""

    def join(self, message: int, now: float) -> bool:
        """The message has just started: whether it begins anew because more was put into it."""


class Planned:
    """Messages of a plan: batch k is submitted when its members are ready, batch k-1 was submitted and batch k-window
    has arrived.  chained: of so many first batches each waits for the arrival of the one before, whatever the window.
    """

    def __init__(self, members: list[list[int]], bytes_: list[int], window: int, transfers: int, chained: int = 0):
        self.members, self.bytes_, self.window = members, bytes_, window
        self.ready = [math.nan] * len(members)
        self.submitted = [math.nan] * len(members)
        self._missing = [len(m) for m in members]
        self._batches = _carriers(members, transfers)
        self._next = 0  # to be submitted
        self._chained = chained
        self._taken = 0

    def offer(self, transfers: list[int], now: float) -> None:
        for batch in _completed(transfers, self._batches, self._missing):
            self.ready[batch] = now
        self._submit(self._taken - 1, now)

    def take(self, now: float) -> int | None:
        self._submit(self._taken, now)
        if self._taken == self._next:
            return None
        self._taken += 1
        return self._taken - 1

    def join(self, message: int, now: float) -> bool:
        return False

    def _submit(self, arrived: int, now: float) -> None:
        while self._next < len(self.members) and not self._missing[self._next]:
            window = 1 if self._next < self._chained else self.window
            if self._next >= arrived + window:
                break
            self.submitted[self._next] = now
            self._next += 1


@dataclass(frozen=True)
class Unit:
    """What Horovod is handed as one: a gradient, or a plan's batch. members: its transfers, one for each piece.
    kind: units of one kind may share a message; None: it travels alone."""

    members: Sequence[int]
    bytes_: int
    kind: str | None


class AsItComes:
    """Messages as Horovod makes them: a free network takes the unit that has been ready longest, and with it those of
    its kind, in order of readiness, up to `fusion_bytes` (0: every unit travels alone).

    What becomes ready within half a cycle of that moment is put into the message too, which then begins anew: the wait
    for the next cycle, half of it in the mean, is in the measured start-up time already. (Approximate: what the message
    took of the cores until then stays taken.)

    chained: so many first units are handed over one by one, each when the one before has arrived.
    units: of each message, those in it.
    """

    def __init__(
        self, units: Sequence[Unit], transfers: int, fusion_bytes: int, cycle_seconds: float, chained: int = 0
    ):
        self.units: list[list[int]] = []
        self.members: list[list[int]] = []
        self.bytes_: list[int] = []
        self.ready: list[float] = []
        self.submitted: list[float] = []
        self._units, self._chained = units, chained
        self._fusion_bytes, self._cycle_seconds = fusion_bytes, cycle_seconds
        self._missing = [len(unit.members) for unit in units]
        self._carriers = _carriers([unit.members for unit in units], transfers)
        self._ready = [math.nan] * len(units)
        self._line: list[tuple[float, int]] = []  # (when it was handed over, unit)
        self._next = 0  # of the chained units
        self._closes = 0.0

    def offer(self, transfers: list[int], now: float) -> None:
        for unit in _completed(transfers, self._carriers, self._missing):
            self._ready[unit] = now
            if unit >= self._chained:
                self._line.append((now, unit))
        if not self._next:
            self._hand_over(now)

    def take(self, now: float) -> int | None:
        self._hand_over(now)
        if not self._line:
            return None
        when, first = self._line.pop(0)
        self.units.append([])
        self.members.append([])
        self.bytes_.append(0)
        self.ready.append(0.0)
        self.submitted.append(0.0)
        self._put(when, first)
        self._closes = now + self._cycle_seconds / 2
        self._fill()
        return len(self.members) - 1

    def join(self, message: int, now: float) -> bool:
        return now <= self._closes and self._fill()

    def _hand_over(self, now: float) -> None:
        """The next chained unit. Called when the network is free, so what was in the line before may have arrived."""
        waiting = any(unit < self._chained for _, unit in self._line)
        if self._next < self._chained and not waiting and not self._missing[self._next]:
            self._line.append((now, self._next))
            self._next += 1

    def _put(self, when: float, unit: int) -> None:
        """Into the last message."""
        self.units[-1].append(unit)
        self.members[-1] += self._units[unit].members
        self.bytes_[-1] += self._units[unit].bytes_
        self.ready[-1] = max(self.ready[-1], self._ready[unit])
        self.submitted[-1] = max(self.submitted[-1], when)

    def _fill(self) -> bool:
        """Puts what fits into the last message."""
        kind = self._units[self.units[-1][0]].kind
        if kind is None or not self._fusion_bytes:
            return False
        left, size = [], len(self.units[-1])
        for position, (when, unit) in enumerate(self._line):
            if self._units[unit].kind != kind:
                left.append((when, unit))
            elif self.bytes_[-1] + self._units[unit].bytes_ > self._fusion_bytes:
                left += self._line[position:]
                break
            else:
                self._put(when, unit)
        self._line = left
        return len(self.units[-1]) > size


def _carriers(members: Sequence[Sequence[int]], transfers: int) -> list[list[int]]:
    """Of each transfer, what holds a piece of it, once for each piece."""
    result: list[list[int]] = [[] for _ in range(transfers)]
    for carrier, inside in enumerate(members):
        for transfer in inside:
            result[transfer].append(carrier)
    return result


def _completed(transfers: Iterable[int], carriers: Sequence[Sequence[int]], missing: list[int]) -> list[int]:
    """What is complete now that these transfers are ready, in order; counts `missing` down."""
    done = []
    for transfer in transfers:
        for carrier in carriers[transfer]:
            missing[carrier] -= 1
            if not missing[carrier]:
                done.append(carrier)
    return sorted(done)
