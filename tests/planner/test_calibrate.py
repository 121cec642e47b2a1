"""calibrate: given a step time that was measured, the profile whose simulated step takes that long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.profiles import resnet_like
from tf_caramel.planner.calibrate import calibrate
from tf_caramel.planner.decide import decide
from tf_caramel.planner.simulate import simulate


@pytest.mark.parametrize("batches", ["fixed:8MB", "fixed:8MB,defer", None])
def test_the_simulated_step_takes_what_was_measured(batches: str | None):
    real = replace(resnet_like(), speeds=(1.25, 1.35))
    real = replace(real, transfers=tuple(replace(t, deferrable=True) for t in real.transfers))
    plan = decide(real, "fifo", batches) if batches else None
    assert bool(plan and plan.deferred) == bool(batches and "defer" in batches)
    measured = simulate(real, plan).step_seconds
    found = calibrate(replace(real, speeds=(1.25 * 1.4, 1.35 * 1.4)), plan, measured)
    assert simulate(found, plan).step_seconds == pytest.approx(measured, rel=0.01)
    assert found.speeds[1] / found.speeds[0] == pytest.approx(1.35 / 1.25)


@pytest.mark.parametrize(("seconds", "mean"), [(1e-6, 1.0), (1e6, 1.5)])
def test_no_step_time_makes_ops_faster_than_seen_or_slower_than_traced(seconds: float, mean: float):
    profile = replace(resnet_like(), speeds=(1.4, 1.6))
    assert sum(calibrate(profile, None, seconds).speeds) / 2 == pytest.approx(mean, abs=0.001)


def test_a_larger_speed_is_believed_if_one_says_so():
    real = replace(resnet_like(), speeds=(2.0, 2.0))
    measured = simulate(real, None).step_seconds
    found = calibrate(replace(real, speeds=(1.1, 1.1)), None, measured, most=4.0)
    assert simulate(found, None).step_seconds == pytest.approx(measured, rel=0.01)
