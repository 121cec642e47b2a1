"""calibrate: given a step time that was measured, the profile whose simulated step takes that long; hold: given the
messages of a step, the network on which they take that long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.profiles import resnet_like
from tf_caramel.planner.calibrate import calibrate, hold
from tf_caramel.planner.decide import decide
from tf_caramel.planner.profile import Network
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


PROBED = Network(0.009, 1e-8, queued_seconds=0.004, stretch=1.2, busy_start_up_seconds=0.015)


def messages(start_up: float, busy: float, during: int, after: int, noise: float = 0.0):
    """Of 1 MB, 2 MB, ..., handed over at 0, 1, ...; as many before `during` as after it."""
    made = []
    for k in range(during + after):
        bytes_ = (k + 1) * 1_000_000
        seconds = start_up + 1e-8 * bytes_ + (busy if k < during else 0.0) + (noise if k % 3 == 0 else 0.0)
        made.append((bytes_, float(k), seconds))
    return made


def test_start_ups_are_those_of_the_step_s_own_messages():
    held = hold(PROBED, messages(0.003, 0.002, during=7, after=5, noise=0.5), passes_end=6.5)
    assert held.start_up_seconds == pytest.approx(0.003)
    assert held.busy_start_up_seconds == pytest.approx(0.002)
    assert held.queued_seconds == pytest.approx(0.003)  # no more than one that is not queued
    assert (held.stretch, held.seconds_per_byte) == (1.0, PROBED.seconds_per_byte)


def test_few_messages_tell_nothing_of_their_part_of_the_step():
    held = hold(PROBED, messages(0.003, 0.002, during=7, after=2), passes_end=6.5)
    assert held.start_up_seconds == PROBED.start_up_seconds
    assert held.busy_start_up_seconds == 0.0  # all of it is in the start-up, which is the probe's
    held = hold(PROBED, messages(0.003, 0.002, during=2, after=5), passes_end=1.5)
    assert (held.busy_start_up_seconds, held.stretch) == (PROBED.busy_start_up_seconds, PROBED.stretch)
    assert hold(PROBED, [], 1.0) == PROBED


def test_a_start_up_is_never_below_zero_or_longer_than_the_probe_s():
    held = hold(PROBED, messages(-0.5, 0.0, during=0, after=5), passes_end=-1.0)
    assert held.start_up_seconds == 0.0
    held = hold(PROBED, messages(0.5, 0.0, during=4, after=5), passes_end=3.5)
    assert held.start_up_seconds == PROBED.start_up_seconds
