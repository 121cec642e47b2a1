"""Holds a profile to what was measured of whole steps: `calibrate` its ops to a step's time, `hold` its network to the
step's own messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from tf_caramel.planner.compress import compress
from tf_caramel.planner.defer import retime
from tf_caramel.planner.plan import BodyPlan
from tf_caramel.planner.profile import Network, Profile
from tf_caramel.planner.simulate import simulate

_ROUNDS = 12
ENOUGH = 3  # messages, to tell something by


def hold(network: Network, messages: Sequence[tuple[int, float, float]], passes_end: float) -> Network:
    """The network as the messages of a step found it, of which one travelled at a time.

    messages: (bytes, when it was handed over, seconds).  passes_end: when the forward and the backward pass were over.
    What messages take beyond their bytes is the start-up, after the passes, and the start-up beside computing, during
    them. A probe makes computing up, and finds the latter two to five times too long. Seconds of a byte stay the
    probe's: within a step, sizes differ too little.
    """
    start_up, busy, stretch = network.start_up_seconds, network.busy_start_up_seconds, network.stretch
    during, after = (
        [seconds - network.seconds_per_byte * bytes_ for bytes_, at, seconds in messages if (at >= passes_end) == late]
        for late in (False, True)
    )
    if len(after) >= ENOUGH:
        start_up = min(start_up, max(0.0, statistics.median(after)))
    if len(during) >= ENOUGH:
        busy, stretch = max(0.0, statistics.median(during) - start_up), 1.0
    queued = network.queued_seconds
    return replace(
        network,
        start_up_seconds=start_up,
        queued_seconds=None if queued is None else min(queued, start_up),
        busy_start_up_seconds=busy,
        stretch=stretch,
    )


def calibrate(profile: Profile, plan: BodyPlan | None, step_seconds: float, most: float | None = None) -> Profile:
    """The profile with `speeds` scaled so that the simulated step under `plan` (None: as traced) takes `step_seconds`.

    Ops are known by their shortest times; that every op always takes no more (the mean speed is 1) is the least that is
    believed.  most: the largest mean speed that is; by default the profile's own, which the traced steps showed, and
    the tracer itself takes time.
    """
    speeds = profile.speeds
    mean = sum(speeds) / len(speeds)
    deferred = plan.deferred_transfers if plan else ()
    small = compress(retime(profile, deferred), plan.edges if plan else ())
    body = replace(plan, edges=()) if plan else None

    def scaled(speed: float) -> tuple[float, ...]:
        return tuple(s / mean * speed for s in speeds)

    low, high = min(1.0, mean), max(1.0, most or mean)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if simulate(replace(small, speeds=scaled(middle)), body, detail=False).step_seconds < step_seconds:
            low = middle
        else:
            high = middle
    return replace(profile, speeds=scaled((low + high) / 2))
