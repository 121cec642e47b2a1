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


SAMPLES = tuple((bytes_, 0.009 + 1.2e-8 * bytes_) for bytes_ in (16 * 2**10, 128 * 2**10, 2**20))
PROBED = Network(0.009, 1.2e-8, queued_seconds=0.004, stretch=1.2, busy_start_up_seconds=0.015, samples=SAMPLES)


def messages(start_up: float, busy: float, during: int, after: int, noise: float = 0.0):
    """Of 4 MB, 5 MB, ..., at 1e-8 seconds a byte, handed over at 0, 1, ...; `during` of them before those `after`."""
    made = []
    for k in range(during + after):
        bytes_ = (k + 4) * 1_000_000
        seconds = start_up + 1e-8 * bytes_ + (busy if k < during else 0.0) + (noise if k % 3 == 0 else 0.0)
        made.append((bytes_, float(k), seconds))
    return made


def test_a_byte_takes_what_it_took_in_the_step_and_a_start_up_what_the_probe_s_small_messages_say():
    held = hold(PROBED, messages(0.009, 0.0, during=0, after=9), passes_end=-1.0)
    assert held.seconds_per_byte == pytest.approx(1e-8, rel=0.02)
    # Seen at 250 Mbit/s: the probe's bytes were 8 % slow, so start-ups came out as 0, and 190 messages were planned.
    assert held.start_up_seconds == pytest.approx(0.009, rel=0.05)
    assert held.samples == PROBED.samples
    assert held.queued_seconds == PROBED.queued_seconds


def test_the_start_up_beside_computing_is_that_of_the_step_s_own_messages():
    held = hold(PROBED, messages(0.009, 0.002, during=7, after=5), passes_end=6.5)
    assert held.busy_start_up_seconds == pytest.approx(0.002, abs=0.001)
    assert held.stretch == 1.0
    noisy = hold(PROBED, messages(0.009, 0.002, during=7, after=0, noise=0.5), passes_end=6.5)
    assert noisy.busy_start_up_seconds < 0.1


def test_few_messages_tell_nothing_of_their_part_of_the_step():
    held = hold(PROBED, messages(0.009, 0.002, during=7, after=2), passes_end=6.5)
    assert (held.start_up_seconds, held.seconds_per_byte) == (PROBED.start_up_seconds, PROBED.seconds_per_byte)
    assert held.busy_start_up_seconds == 0.0  # faster than the probe's: none is left beyond it
    held = hold(PROBED, messages(0.009, 0.002, during=2, after=5), passes_end=1.5)
    assert (held.busy_start_up_seconds, held.stretch) == (PROBED.busy_start_up_seconds, PROBED.stretch)
    assert hold(PROBED, [], 1.0) == PROBED


def test_a_queued_message_is_no_dearer_than_one_that_is_not():
    held = hold(replace(PROBED, queued_seconds=0.009), messages(0.001, 0.0, during=0, after=30), passes_end=-1.0)
    assert held.queued_seconds == min(0.009, held.start_up_seconds)
