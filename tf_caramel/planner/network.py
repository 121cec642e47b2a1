"""The network model: fitted to measured all-reduces, and carried over to another set-up (ranks, link, collective).

`fit` turns samples (bytes, seconds) into a + b*bytes. `at` answers "the same software on that network" from the
alpha-beta model of collectives: a hop costs alpha seconds, a byte on the link beta.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tf_caramel.planner.profile import InputError, Network

COLLECTIVES = ("ring", "halving-doubling", "tree")


def fit(samples: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * bytes, neither below 0, with the least sum of squared relative errors.

    Relative: a sample of 64 kB counts as much as one of 8 MB. Closed form: the minimum of a convex function of two
    variables lies inside, or else on the better of the two edges (a = 0, b = 0).
    Raises ValueError if a sample is not bytes > 0 and seconds > 0, or if there are fewer than two sizes.
    """
    given = sorted(samples)
    for bytes_, seconds in given:
        if not (0 < bytes_ < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"the sample of {bytes_} bytes in {seconds} s cannot be: both must be above 0")
    if len({bytes_ for bytes_, _ in given}) < 2:
        shown = f"all samples are of {given[0][0]} bytes" if given else "there are no samples"
        raise ValueError(f"a line needs samples of two sizes, but {shown}")
    # (a + b n)/t - 1 is a x + b y - 1; sizes are divided by the largest, so that x and y are of one magnitude.
    largest = given[-1][0]
    points = [(1 / seconds, bytes_ / largest / seconds) for bytes_, seconds in given]
    x, y = (math.fsum(p[i] for p in points) for i in (0, 1))
    xx, xy, yy = (math.fsum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    determinant = xx * yy - xy * xy
    inside = ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant)
    if min(inside) < 0:
        return (0.0, y / yy / largest) if y * y / yy > x * x / xx else (x / xx, 0.0)
    return inside[0], inside[1] / largest


def cost(collective: str, ranks: int) -> tuple[float, float]:
    """(hops, share): an all-reduce of n bytes over p ranks takes hops * alpha + share * n * beta seconds.

    ring               2 (p-1) alpha         + 2 (p-1)/p n beta
    halving-doubling   2 log2(p) alpha       + 2 (p-1)/p n beta, p a power of two; else that of the largest power of two
                       below p, and 2 alpha + 2 n beta to fold the other ranks in and to hand them the result
    tree               2 ceil(log2 p) (alpha + n beta): reduced up a binomial tree, sent back down

    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005;
    without their gamma, the time to add two numbers, which is part of the measured b.
    Raises InputError for another collective.
    """
    if collective == "ring":
        return 2.0 * (ranks - 1), 2 * (ranks - 1) / ranks
    levels = (ranks - 1).bit_length()  # ceil(log2 p)
    if collective == "halving-doubling":
        if ranks == 2**levels:
            return 2.0 * levels, 2 * (ranks - 1) / ranks
        hops, share = cost(collective, 2 ** (levels - 1))
        return hops + 2, share + 2
    if collective == "tree":
        return 2.0 * levels, 2.0 * levels
    raise InputError(f"collective {collective!r} is none of {', '.join(COLLECTIVES)}")


def at(
    network: Network,
    ranks: int,
    gbit: float | None = None,
    latency_seconds: float | None = None,
    collective: str = "ring",
) -> Network:
    """The same software on another set-up: `ranks` ranks, a link of `gbit` Gbit/s, hops of `latency_seconds`.

    The network is taken to have been measured with a ring. Without a latency all of its start-up is software, and hops
    cost nothing; with one, start-up = software + hops * latency, software = what was measured less its own hops, not
    below 0; the start-up of a queued message likewise. Without gbit, beta is what makes the measured b of a ring.
    The CPU time of a byte grows with the bytes that a rank moves (the share of `cost`), and b does not fall below
    it: software cannot move bytes faster than its core does. The CPU time of a message and of a copy stay as they are.
    The result has no samples, for nothing was measured there.
    Raises InputError for a set-up that cannot be, or a network measured on one rank (it moved nothing) without gbit.
    """
    if ranks < 1:
        raise InputError(f"ranks: {ranks}, but it must be 1 or more")
    if gbit is not None and not 0 < gbit < math.inf:
        raise InputError(f"gbit: {gbit}, but it must be above 0")
    if latency_seconds is not None and not 0 <= latency_seconds < math.inf:
        raise InputError(f"latency: {latency_seconds} s, but it must be 0 or more")
    hops, share = cost(collective, ranks)
    measured_hops, measured_share = cost("ring", network.ranks)
    if gbit is not None:
        beta = 8e-9 / gbit
    elif measured_share:
        beta = network.seconds_per_byte / measured_share
    else:
        raise InputError("the network was measured on one rank, which sends nothing: say how fast the link is (gbit)")
    latency = latency_seconds or 0.0

    def start_up(measured: float) -> float:
        return max(0.0, measured - measured_hops * latency) + hops * latency

    cpu = network.cpu_seconds_per_byte * (share / measured_share if measured_share else 1.0)
    return replace(
        network,
        start_up_seconds=start_up(network.start_up_seconds),
        seconds_per_byte=max(share * beta, cpu),
        queued_seconds=None if network.queued_seconds is None else start_up(network.queued_seconds),
        cpu_seconds_per_byte=cpu,
        ranks=ranks,
        samples=(),
    )
