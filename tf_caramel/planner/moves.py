"""Neighbours of a batching: what the local search of `search` tries next. Batches in, batches out, most promising
first.

What the step waits for is at its end, therefore the last batches are tried first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from tf_caramel.planner.batches import Batch, Batches
from tf_caramel.planner.order import Item, sequence
from tf_caramel.planner.plan import Piece
from tf_caramel.planner.profile import Network

STAGES = 3  # of a message's way through a rank: copied in, reduced, copied out
MOST_PARTS = 16


def neighbours(batches: Batches) -> Iterator[Batches]:
    """Every batching one step away: the last batch's tail split off, two batches merged, one split, a boundary moved,
    two batches in each other's place. With deferral the step begins to wait for the first batch: its head, too."""
    yield from _tails(batches)
    if batches[0][0].level < 0:
        yield from _heads(batches)
    for k in reversed(range(len(batches))):
        following = next((n for n in range(k + 1, len(batches)) if _alike(batches[k], batches[n])), None)
        if following is not None:
            yield from _pairs(batches, k, following)
        if len(batches[k]) > 1:
            at = _middle(batches[k], 0.5)
            yield (*batches[:k], batches[k][:at], batches[k][at:], *batches[k + 1 :])
    for k in reversed(range(len(batches) - 1)):
        if batches[k][0].level == batches[k + 1][0].level:
            yield (*batches[:k], batches[k + 1], batches[k], *batches[k + 2 :])


def _alike(a: Batch, b: Batch) -> bool:
    return a[0].group is not None and a[0].group == b[0].group


def _tails(batches: Batches) -> Iterator[Batches]:
    last = batches[-1]
    size = 1
    while size < len(last):
        yield (*batches[:-1], last[:-size], last[-size:])
        size *= 2


def _heads(batches: Batches) -> Iterator[Batches]:
    first = batches[0]
    size = 1
    while size < len(first):
        yield (first[:size], first[size:], *batches[1:])
        size *= 2


def _pairs(batches: Batches, k: int, following: int) -> Iterator[Batches]:
    """Batch k and the next one of its group: merged, then with part of one moved into the other. Batches of other
    groups between them keep their places."""
    first, second = batches[k], batches[following]
    between, after = batches[k + 1 : following], batches[following + 1 :]
    yield (*batches[:k], *between, first + second, *after)
    cuts = []
    if len(first) > 1:
        cuts += [_middle(first, 0.5), len(first) - 1]
    if len(second) > 1:
        cuts += [len(first) + _middle(second, 0.5), len(first) + 1]
    for cut in dict.fromkeys(cuts):
        both = first + second
        yield (*batches[:k], both[:cut], *between, both[cut:], *after)


def _middle(batch: Batch, share: float) -> int:
    """Where to cut so that about `share` of the bytes come first and no side is empty."""
    sums = list(accumulate(item.bytes_ for item in batch))
    return max(1, sum(s <= share * sums[-1] for s in sums[:-1]))


def chunked(batches: Batches, network: Network) -> Iterator[Batches]:
    """Batchings in which the one or three largest gradients are cut into equal parts that travel alone.

    The best number of parts of S bytes is k* = sqrt((m - 1) b S / a) for m stages that work at the same time, each of
    which takes a + b S / k for a part (the makespan (k + m - 1)(a + b S / k) is least there); half and twice as many
    are tried too, because the stages here are not equal. Between parts more urgent batches that are ready go first.
    What is deferred stays whole: an update that needs several collectives cannot be moved with one of them.
    """
    items = [item for batch in batches for item in batch if item.group is not None and item.level >= 0]
    largest = sorted(items, key=lambda item: (-item.bytes_, item.piece))
    for count in (1, 3)[: len(largest)]:
        for factor in (1, 0.5, 2):
            parts = {item: n for item in largest[:count] if (n := _parts(item.bytes_, network, factor)) > 1}
            if parts:
                yield _cut(batches, parts, network)


def _parts(bytes_: int, network: Network, factor: float) -> int:
    a = network.start_up_seconds
    ideal = math.sqrt((STAGES - 1) * network.seconds_per_byte * bytes_ / a) if a > 0 else MOST_PARTS
    return min(MOST_PARTS, round(factor * ideal), bytes_)


def _cut(batches: Batches, parts: Mapping[Item, int], network: Network) -> Batches:
    jobs: dict[Item, Batch] = {}
    for batch in batches:
        for item in batch:
            for p in range(parts.get(item, 0)):
                piece = Piece(item.piece.transfer, p, parts[item])
                part = replace(item, piece=piece, bytes_=piece.bytes_of(item.bytes_))
                jobs[part] = (part,)
        rest = tuple(item for item in batch if item not in parts)
        if rest:
            bytes_, ready = sum(item.bytes_ for item in rest), max(item.ready for item in rest)
            urgent = min(item.priority for item in rest)
            jobs[replace(rest[0], bytes_=bytes_, ready=ready, priority=urgent)] = rest
    return tuple(jobs[job] for job in sequence(tuple(jobs), network))
