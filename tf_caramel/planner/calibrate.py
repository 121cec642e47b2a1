"""Holds a profile to what was measured of whole steps: `calibrate` its ops to a step's time, `hold` its network to the
step's own messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from tf_caramel.planner.compress import compress
from tf_caramel.planner.defer import retime
from tf_caramel.planner.network import fit
from tf_caramel.planner.plan import BodyPlan
from tf_caramel.planner.profile import Network, Profile
from tf_caramel.planner.simulate import simulate

_ROUNDS = 12
ENOUGH = 3  # messages, to tell something by


def hold(network: Network, messages: Sequence[tuple[int, float, float]], passes_end: float) -> Network:
    """The network as the messages of a step found it, of which one travelled at a time.

    messages: (bytes, when it was handed over, seconds).  passes_end: when the forward and the backward pass were over.
    The line through the probe's messages is drawn anew through those and the step's after the passes: the small ones
    of the probe tell the start-up, the large ones of the step the seconds of a byte. What messages during the passes
    take beyond that is the start-up beside computing: a probe makes computing up, and finds it two to five times too
    long.
    """
    during, after = (
        [(bytes_, seconds) for bytes_, at, seconds in messages if (at >= passes_end) == late] for late in (False, True)
    )
    start_up, per_byte = network.start_up_seconds, network.seconds_per_byte
    busy, stretch = network.busy_start_up_seconds, network.stretch
    if len(after) >= ENOUGH:
        start_up, per_byte = fit([*network.samples, *after])
    if len(during) >= ENOUGH:
        beyond = statistics.median(seconds - per_byte * bytes_ for bytes_, seconds in during)
        busy, stretch = max(0.0, beyond - start_up), 1.0
    queued = network.queued_seconds
    return replace(
        network,
        start_up_seconds=start_up,
        seconds_per_byte=per_byte,
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
