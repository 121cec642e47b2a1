"""Holds a profile to a step time that was measured: how much longer than its shortest time an op typically takes."""

from __future__ import annotations

from dataclasses import replace

from tf_caramel.planner.compress import compress
from tf_caramel.planner.plan import BodyPlan
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.simulate import simulate

_ROUNDS = 12


def calibrate(profile: Profile, plan: BodyPlan | None, step_seconds: float) -> Profile:
    """The profile with `speeds` scaled so that the simulated step under `plan` takes `step_seconds`.

    Ops are known by their shortest times. The speeds that the traced steps showed are the most that is believed, for
    the tracer itself takes time; that every op always takes its shortest time (the mean speed is 1) is the least.
    """
    speeds = profile.speeds
    mean = sum(speeds) / len(speeds)
    small = compress(profile, plan.edges if plan else ())
    body = replace(plan, edges=()) if plan else None

    def scaled(speed: float) -> tuple[float, ...]:
        return tuple(s / mean * speed for s in speeds)

    low, high = min(1.0, mean), max(1.0, mean)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if simulate(replace(small, speeds=scaled(middle)), body, detail=False).step_seconds < step_seconds:
            low = middle
        else:
            high = middle
    return replace(profile, speeds=scaled((low + high) / 2))
