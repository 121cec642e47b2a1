"""Which message is next: as a plan says, or as Horovod does without one. Transfers and messages are numbers here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from tf_caramel.planner.profile import Transfer


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
    has arrived; with window 0 when its members are ready, those of the same instant in the plan's order.
    """

    def __init__(self, members: list[list[int]], bytes_: list[int], window: int, transfers: int):
        self.members, self.bytes_, self.window = members, bytes_, window
        self.ready = [math.nan] * len(members)
        self.submitted = [math.nan] * len(members)
        self._missing = [len(m) for m in members]
        self._batches: list[list[int]] = [[] for _ in range(transfers)]
        for batch, inside in enumerate(members):
            for transfer in inside:
                self._batches[transfer].append(batch)
        self._line: list[int] = []  # submitted, in order
        self._taken = 0

    def offer(self, transfers: list[int], now: float) -> None:
        complete = []
        for transfer in transfers:
            for batch in self._batches[transfer]:
                self._missing[batch] -= 1
                if not self._missing[batch]:
                    self.ready[batch] = now
                    complete.append(batch)
        if not self.window:
            self._submit(sorted(complete), now)
        elif complete:
            self._submit_in_turn(self._taken - 1, now)

    def take(self, now: float) -> int | None:
        if self.window:
            self._submit_in_turn(self._taken, now)
        if self._taken == len(self._line):
            return None
        self._taken += 1
        return self._line[self._taken - 1]

    def join(self, message: int, now: float) -> bool:
        return False

    def _submit_in_turn(self, arrived: int, now: float) -> None:
        batch = len(self._line)
        while batch < len(self.members) and not self._missing[batch] and batch < arrived + self.window:
            self._submit([batch], now)
            batch += 1

    def _submit(self, batches: Iterable[int], now: float) -> None:
        for batch in batches:
            self.submitted[batch] = now
            self._line.append(batch)


class AsItComes:
    """Messages as Horovod makes them: a free network takes the transfer that has been ready longest, and with it those
    of its kind, in order of readiness, up to `fusion_bytes` (0: every transfer travels alone).

    What becomes ready within half a cycle of that moment is put into the message too, which then begins anew: the wait
    for the next cycle, half of it in the mean, is in the measured start-up time already. (Approximate: what the message
    took of the cores until then stays taken.)
    """

    def __init__(self, transfers: Sequence[Transfer], fusion_bytes: int, cycle_seconds: float):
        self.members: list[list[int]] = []
        self.bytes_: list[int] = []
        self.ready: list[float] = []
        self.submitted = self.ready
        self._transfers = transfers
        self._fusion_bytes, self._cycle_seconds = fusion_bytes, cycle_seconds
        self._line: list[tuple[float, int]] = []  # (when it was ready, transfer)
        self._closes = 0.0

    def offer(self, transfers: list[int], now: float) -> None:
        self._line += [(now, transfer) for transfer in transfers]

    def take(self, now: float) -> int | None:
        if not self._line:
            return None
        when, first = self._line.pop(0)
        self.members.append([first])
        self.bytes_.append(self._transfers[first].bytes_)
        self.ready.append(when)
        self._closes = now + self._cycle_seconds / 2
        self._fill()
        return len(self.members) - 1

    def join(self, message: int, now: float) -> bool:
        return now <= self._closes and self._fill()

    def _fill(self) -> bool:
        """Puts what fits into the last message."""
        kind = self._transfers[self.members[-1][0]].kind
        if kind is None or not self._fusion_bytes:
            return False
        left, size = [], len(self.members[-1])
        for position, (when, transfer) in enumerate(self._line):
            if self._transfers[transfer].kind != kind:
                left.append((when, transfer))
            elif self.bytes_[-1] + self._transfers[transfer].bytes_ > self._fusion_bytes:
                left += self._line[position:]
                break
            else:
                self.members[-1].append(transfer)
                self.bytes_[-1] += self._transfers[transfer].bytes_
                self.ready[-1] = when
        self._line = left
        return len(self.members[-1]) > size
