"""trace: given the tracer's events of a call, each op's share of the time that passed."""

from __future__ import annotations

import pytest

from tf_caramel.runtime.trace import StepTimes, merge, step_times

BATCH = "HorovodAllreduce_b"


def times(kernels, spans=None, ops=("a", "b", "c"), taken=0.0, prefix="p/") -> StepTimes:
    kernels = [(prefix + name, start, end) for name, start, end in kernels]
    spans = {prefix + name: pairs for name, pairs in (spans or {BATCH: [(50.0, 60.0)]}).items()}
    found = step_times(kernels, spans, set(ops), {BATCH, "HorovodAllreduce_c"}, taken)
    assert found is not None
    return found


def test_ops_one_after_the_other_have_the_time_they_took():
    assert times([("a", 1.0, 3.0), ("b", 5.0, 6.0)]).seconds == {"a": 2.0, "b": 1.0}


def test_an_instant_that_two_ops_share_counts_half_for_each():
    assert times([("a", 0.0, 4.0), ("b", 2.0, 6.0)]).seconds == {"a": 3.0, "b": 3.0}


def test_a_short_gap_is_the_executor_s_and_goes_to_the_next_op_a_long_one_is_waiting():
    seconds = times([("a", 0.0, 1.0), ("b", 1.0002, 2.0), ("c", 3.0, 4.0)]).seconds
    assert seconds == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})


def test_what_a_message_takes_from_the_cores_is_not_the_op_s_own_time():
    assert times([("a", 0.0, 4.0)], {BATCH: [(2.0, 9.0)]}, taken=0.25).seconds == {"a": 3.5}


def test_ops_of_a_call_or_loop_count_for_it_and_grappler_s_names_for_what_they_were():
    kernels = [("a/inner/MatMul", 0.0, 1.0), ("a/inner/Add", 1.0, 2.0), ("ArithmeticOptimizer/b", 3.0, 4.0)]
    assert times(kernels).seconds == {"a": 2.0, "b": 1.0}


def test_kernels_outside_the_step_are_not_its_own():
    found = step_times(
        [("p/a", 0.0, 1.0), ("other/a", 5.0, 9.0)], {f"p/{BATCH}": [(2.0, 3.0)]}, {"a"}, {BATCH}, taken=0.0
    )
    assert found is not None
    assert (found.seconds, found.span_seconds) == ({"a": 1.0}, 1.0)


def test_time_of_no_op_is_reported():
    assert times([("a", 0.0, 3.0), ("unknown", 4.0, 5.0)]).unmatched == 0.25


def test_without_a_prefix_what_is_not_the_step_s_is_left_out():
    found = times([("a", 0.0, 3.0), ("GatherV2", 3.0001, 5.0)], prefix="")
    assert (found.seconds, found.unmatched, found.span_seconds) == ({"a": 3.0}, 0.0, 3.0)


def test_a_call_of_several_steps_gives_the_time_of_one():
    found = times([("a", 0.0, 1.0), ("a", 10.0, 13.0)], {BATCH: [(2.0, 3.0), (14.0, 15.0)]})
    assert (found.steps, found.seconds, found.messages) == (2, {"a": 2.0}, [(BATCH, 2.0, 3.0)])


def test_starts_and_messages_count_from_the_first_op():
    found = times([("b", 12.0, 13.0), ("a", 10.0, 11.0)], {BATCH: [(12.5, 14.0)]})
    assert (found.start, found.messages) == ({"a": 0.0, "b": 2.0}, [(BATCH, 2.5, 4.0)])


def test_a_message_whose_end_the_tracer_missed_is_left_out():
    found = times([("a", 0.0, 1.0)], {BATCH: [(0.5, 2.0)], "HorovodAllreduce_c": []})
    assert [name for name, _, _ in found.messages] == [BATCH]
    assert step_times([("p/a", 0.0, 1.0)], {f"p/{BATCH}": []}, {"a"}, {BATCH}, 0.0) is None


def test_without_one_of_the_collectives_there_is_nothing_to_tell():
    assert step_times([("a", 0.0, 1.0)], {"p/other": [(0.0, 1.0)]}, {"a"}, {BATCH}, 0.0) is None


def test_of_several_calls_each_op_has_its_shortest_time():
    calls = [times([("a", 0.0, a), ("b", 10.0, 10.0 + b)]) for a, b in ((3.0, 1.0), (2.0, 2.0), (4.0, 3.0))]
    assert merge(calls).seconds == {"a": 2.0, "b": 1.0}
