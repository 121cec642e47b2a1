"""Batchings: which neighbours of a sequence share a message. Sequence and network in, batches out.

`none`, `fixed:<bytes>` and `mgwfbp` decide by themselves; `adaptive` searches with the simulator (`search`).
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import TypeAlias

from tf_caramel.planner.order import Item
from tf_caramel.planner.profile import InputError, Network

Batch: TypeAlias = tuple[Item, ...]
Batches: TypeAlias = tuple[Batch, ...]
Batcher: TypeAlias = Callable[[Sequence[Item], Network], Batches]

UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
FEWEST_UP_TO = 64  # messages: beyond, mgwfbp's ties are not broken towards fewer


def none(items: Sequence[Item], network: Network) -> Batches:
    """Every piece alone."""
    return tuple((item,) for item in items)


def fixed(cap: int) -> Batcher:
    """Fills batches up to `cap` bytes in the order of the sequence; what is larger travels alone.

    Each group fills a batch of its own, else kinds that alternate would never share one; a batch is submitted in the
    turn of its last member.
    """

    def batcher(items: Sequence[Item], network: Network) -> Batches:
        closed: list[list[int]] = []
        filling: dict[Hashable, tuple[list[int], int]] = {}
        for k, item in enumerate(items):
            if item.group is None:
                closed.append([k])
                continue
            members, size = filling.get(item.group, ([], 0))
            if members and size + item.bytes_ > cap:
                closed.append(members)
                members, size = [], 0
            filling[item.group] = ([*members, k], size + item.bytes_)
        closed += [members for members, _ in filling.values()]
        return tuple(tuple(items[k] for k in members) for members in sorted(closed, key=lambda members: members[-1]))

    return batcher


def mgwfbp(items: Sequence[Item], network: Network) -> Batches:
    """The merge whose last message ends first in MG-WFBP's model (Shi, Chu, Li; arXiv 1811.11141, section 4): compute
    is not affected, message j starts at max(end of message j-1, readiness of its members) and takes a + b * bytes.

    Exact: an earlier end of a prefix never makes the rest later, so the earliest end of each prefix follows from those
    of shorter ones. Of equal ends, the fewest messages (up to FEWEST_UP_TO of them).

    Deferred pieces are the same seen backwards in time: what the forward pass comes to last may arrive last. What is
    ready meanwhile waits for them.
    """
    head = [item for item in items if item.level < 0]
    rest = items[len(head) :]
    last = max((item.due for item in head), default=0.0)
    cuts = _merged(head[::-1], [last - item.due for item in reversed(head)], network)
    batches = [tuple(head[len(head) - b : len(head) - a]) for a, b in reversed(cuts)]
    arrived = sum(network.seconds(sum(item.bytes_ for item in batch)) for batch in batches)
    cuts = _merged(rest, [max(item.ready, arrived) for item in rest], network)
    return (*batches, *(tuple(rest[a:b]) for a, b in cuts))


def _merged(items: Sequence[Item], ready: Sequence[float], network: Network) -> list[tuple[int, int]]:
    """The best merge of items that are ready at these times: first and past the last of each message."""
    if not items:
        return []
    model = _Model(items, ready, network)
    ends, cut = model.earliest()
    latest = ends[-1] * (1 + 1e-12)  # ends that differ by rounding only are equal
    cuts = _walk([cut] * len(items))
    ends = [0.0] + [math.inf] * len(items)
    passes: list[list[int]] = []
    while len(passes) < min(len(cuts), FEWEST_UP_TO):
        ends, cut = model.earliest(ends)
        passes.append(cut)
        if ends[-1] <= latest:
            cuts = _walk(passes)
            break
    return list(zip(cuts, [*cuts[1:], len(items)], strict=True))


class _Model:
    """MG-WFBP's model of a sequence. A prefix of it is given by the number of its items."""

    def __init__(self, items: Sequence[Item], ready: Sequence[float], network: Network):
        self._a, self._b = network.start_up_seconds, network.seconds_per_byte
        self._bytes = [0, *accumulate(item.bytes_ for item in items)]
        # A message's own readiness or that of the whole prefix: what came before it has been sent, so was ready.
        self._ready = [*accumulate(ready, max)]
        self._first = [0] * len(items)  # the first item that each can share a message with
        for k in range(1, len(items)):
            alike = items[k].group is not None and items[k].group == items[k - 1].group
            self._first[k] = self._first[k - 1] if alike else k

    def earliest(self, shorter: Sequence[float] | None = None) -> tuple[list[float], list[int]]:
        """The earliest end of each prefix, and its last message's first item.

        shorter: the earliest ends of what comes before the last message, if not the same ones. They never fall from
        prefix to longer prefix. So of those that end before the message is ready the longest is best; of the others the
        one with the least end - b * bytes, which a queue of falling candidates knows: the whole is linear in the items.
        """
        a, b, sums = self._a, self._b, self._bytes
        ends, cut = [0.0], [0]
        before = ends if shorter is None else shorter
        queue: deque[tuple[float, int]] = deque()
        idle = 0  # the longest prefix that has arrived when the message is ready
        for i, (ready, first) in enumerate(zip(self._ready, self._first, strict=True), 1):
            value = before[i - 1] - b * sums[i - 1]
            while queue and queue[-1][0] >= value:
                queue.pop()
            queue.append((value, i - 1))
            while idle + 1 < i and before[idle + 1] <= ready:
                idle += 1
            while queue and (queue[0][1] < first or queue[0][1] <= idle):
                queue.popleft()
            best, at = math.inf, first
            if idle >= first:
                best, at = ready + a + b * (sums[i] - sums[idle]), idle
            if queue:
                busy = queue[0][1]
                end = before[busy] + a + b * (sums[i] - sums[busy])
                if end <= best:
                    best, at = end, busy
            ends.append(best)
            cut.append(at)
        return ends, cut


def _walk(cuts: Sequence[Sequence[int]]) -> list[int]:
    """First items of all messages, given of each number of messages the last message's first item for each prefix."""
    result, i = [], len(cuts[0]) - 1
    for cut in reversed(cuts):
        if not i:
            break
        i = cut[i]
        result.append(i)
    return result[::-1]


def size(text: str) -> int:
    """Bytes of "8MB", "512KB", "4096". Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", text.strip(), re.IGNORECASE)
    bytes_ = int(float(match[1]) * UNITS[(match[2] or "").upper()]) if match else 0
    if bytes_ < 1:
        raise InputError(f"batches: {text!r} is not a number of bytes: 4096, 512KB, 8MB, 1GB (powers of 1024)")
    return bytes_


def batcher(text: str) -> Batcher:
    """The batching called `text`: none, fixed:<bytes> or mgwfbp. Raises InputError."""
    name, colon, value = text.partition(":")
    if name == "fixed" and colon:
        return fixed(size(value))
    known: dict[str, Batcher] = {"none": none, "mgwfbp": mgwfbp}
    if text not in known:
        raise InputError(f"batches: {text!r} is none of none, fixed:<bytes>, mgwfbp, adaptive")
    return known[text]
