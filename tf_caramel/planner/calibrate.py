"""Holds a profile to a step time that was measured: how much longer than its shortest time an op typically takes."""

from __future__ import annotations

from dataclasses import replace

from tf_caramel.planner.compress import compress
from tf_caramel.planner.defer import retime
from tf_caramel.planner.plan import BodyPlan
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.simulate import simulate

_ROUNDS = 12


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
