"""The simulator against steps that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tf_caramel.planner.plan import BodyPlan, Piece
from tf_caramel.planner.profile import InputError, Network, Op, Profile, Transfer
from tf_caramel.planner.simulate import Message, Outcome, Span, simulate

approx = pytest.approx

SECOND_A_BYTE = Network(start_up_seconds=0.0, seconds_per_byte=1.0)
ONE_SECOND = Network(start_up_seconds=1.0, seconds_per_byte=0.0)
ONE_BY_ONE = BodyPlan(((Piece("g0"),), (Piece("g1"),)))


def layers(
    seconds: Sequence[float],
    bytes_: Sequence[int],
    network: Network,
    updates: Sequence[float] = (),
    kinds: Sequence[str | None] = (),
    **others: Any,
) -> Profile:
    """Ops b0, b1, ... one after the other; the transfer g<k> starts when b<k> is done, and the op u<k> waits for it."""
    ops: list[tuple[str, float, Sequence[str], float, bool]] = []
    for k, s in enumerate(seconds):
        ops.append((f"b{k}", s, [f"b{k - 1}"] if k else [], 0.0, False))
        ops.append((f"c{k}", 0.0, [f"b{k}"], 0.0, False))
        ops.append((f"u{k}", updates[k] if updates else 0.0, [f"c{k}"], 0.0, False))
    transfers = [(f"g{k}", n, f"c{k}", kinds[k] if kinds else "float32", ()) for k, n in enumerate(bytes_)]
    return Profile.make("key", ops, transfers, network, **others)


def batches(text: str, window: int = 1, edges: tuple[tuple[str, str], ...] = ()) -> BodyPlan:
    """Batches divided by ";", pieces by blanks."""
    return BodyPlan(tuple(tuple(map(Piece.parse, b.split())) for b in text.split(";")), window, edges)


def sent(outcome: Outcome) -> list[tuple[str, float, float]]:
    return [(" ".join(m.pieces), approx(m.start), approx(m.end)) for m in outcome.messages]


def test_of_a_network_faster_than_compute_only_the_last_message_shows():
    profile = layers([2, 2, 2], [1, 1, 1], SECOND_A_BYTE)
    outcome = simulate(profile, batches("g0;g1;g2"))
    assert outcome.step_seconds == approx(6 + 1)
    assert (outcome.compute_seconds, outcome.communication_seconds, outcome.exposed_seconds) == approx((6, 3, 1))
    assert outcome.efficiency == approx((6 + 3 - 7) / 3)


def test_a_slow_network_starts_with_the_first_gradient_and_does_not_rest():
    profile = layers([1, 1, 1], [2, 4, 3], SECOND_A_BYTE)
    outcome = simulate(profile, batches("g0;g1;g2"))
    assert sent(outcome) == [("g0", 1, 3), ("g1", 3, 7), ("g2", 7, 10)]
    assert outcome.step_seconds == approx(1 + 2 + 4 + 3)
    assert outcome.exposed_seconds == approx(7)


def test_efficiency_takes_all_bytes_in_one_message():
    profile = layers([1, 1], [1, 1], replace(SECOND_A_BYTE, start_up_seconds=1.0))
    outcome = simulate(profile, ONE_BY_ONE)
    assert (outcome.step_seconds, outcome.communication_seconds) == approx((1 + 2 + 2, 4))
    assert outcome.efficiency == approx((2 + 3 - 5) / 2)


@pytest.mark.parametrize("profile", [layers([1], [], ONE_SECOND), layers([0, 0], [1, 1], ONE_SECOND)])
def test_there_is_no_efficiency_without_something_to_hide(profile: Profile):
    assert simulate(profile, None).efficiency is None


def test_a_batch_waits_for_its_last_gradient():
    profile = layers([1, 1, 1], [1, 1, 1], SECOND_A_BYTE)
    assert sent(simulate(profile, batches("g0 g1;g2"))) == [("g0 g1", 2, 4), ("g2", 4, 5)]


@pytest.mark.parametrize(
    ("window", "ends"),
    [(1, [1.1, 2.1, 3.1]), (2, [1.1, 1.35, 1.6])],
)
def test_only_a_window_above_one_saves_the_start_up_of_a_queued_message(window: int, ends: list[float]):
    profile = layers([0.1, 0.1, 0.1], [1, 1, 1], replace(ONE_SECOND, queued_seconds=0.25))
    assert [m.end for m in simulate(profile, batches("g0;g1;g2", window)).messages] == approx(ends)


def test_a_window_lets_in_a_batch_when_an_earlier_one_arrives():
    profile = layers([0.1] * 4, [1] * 4, ONE_SECOND)
    of_two = simulate(profile, batches("g0;g1;g2;g3", 2)).messages
    assert [m.submitted for m in of_two] == approx([0.1, 0.2, 1.1, 2.1])
    assert [m.ready for m in of_two] == approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(("window", "order"), [(0, ["g0", "g1"]), (1, ["g1", "g0"]), (2, ["g1", "g0"])])
def test_only_without_a_window_a_batch_overtakes(window: int, order: list[str]):
    profile = layers([1, 1], [1, 1], ONE_SECOND)
    assert [m.pieces[0] for m in simulate(profile, batches("g1;g0", window)).messages] == order


def test_without_a_window_what_is_ready_together_is_fused_in_the_order_of_the_plan():
    profile = layers([1, 0, 0], [1, 1, 1], ONE_SECOND)
    assert [m.pieces for m in simulate(profile, batches("g2;g0;g1", 0)).messages] == [("g2", "g0", "g1")]


def test_batches_without_a_window_are_fused_as_gradients_are():
    profile = layers([1, 1, 1, 1], [1, 1, 1, 1], replace(ONE_SECOND, start_up_seconds=2.5))
    alone = batches("g0;g1;g2;g3", 0)
    assert simulate(profile, alone) == simulate(profile, None)
    assert sent(simulate(profile, alone)) == [("g0", 1, 3.5), ("g1 g2", 3.5, 6), ("g3", 6, 8.5)]
    assert sent(simulate(profile, batches("g0;g1 g3;g2", 0))) == [("g0", 1, 3.5), ("g2", 3.5, 6), ("g1 g3", 6, 8.5)]


def test_chunks_without_a_window_are_fused_with_what_is_there():
    profile = layers([1, 1], [4, 4], replace(ONE_SECOND, start_up_seconds=0.5))
    outcome = simulate(profile, batches("g0[0/2];g0[1/2];g1", 0), fusion_bytes=6)
    assert [m.pieces for m in outcome.messages] == [("g0[0/2]", "g0[1/2]"), ("g1",)]


def test_times_that_differ_by_rounding_are_one_instant():
    ops = (Op("a", 0.1), Op("b", 0.2, (0,)), Op("c", 0.3), Op("after_b", inputs=(1,)), Op("after_c", inputs=(2,)))
    profile = Profile("key", ops, (Transfer("gb", 1, 3), Transfer("gc", 1, 4)), ONE_SECOND)
    assert ops[0].seconds + ops[1].seconds > ops[2].seconds
    messages = simulate(profile, batches("gb;gc", window=0), streams=2).messages
    assert [m.pieces for m in messages] == [("gb", "gc")]


def test_horovod_fuses_what_became_ready_while_the_network_was_busy():
    profile = layers([1, 1, 1, 1], [1, 1, 1, 1], replace(ONE_SECOND, start_up_seconds=2.5))
    assert sent(simulate(profile, None)) == [("g0", 1, 3.5), ("g1 g2", 3.5, 6), ("g3", 6, 8.5)]


def test_horovod_fuses_one_kind_and_what_has_waited_longest_first():
    profile = layers([1, 1, 1, 1], [1, 1, 1, 1], replace(ONE_SECOND, start_up_seconds=3.5), kinds=["a", "b", "a", "b"])
    assert [m.pieces for m in simulate(profile, None).messages] == [("g0",), ("g1", "g3"), ("g2",)]


def test_horovod_fuses_nothing_without_a_kind():
    profile = layers([1, 0, 0], [1, 1, 1], ONE_SECOND, kinds=["a", None, None])
    assert [m.pieces for m in simulate(profile, None).messages] == [("g0",), ("g1",), ("g2",)]


def test_what_is_tied_as_traced_waits_for_all_transfers_and_with_a_plan_for_its_own():
    ops = (Op("a", 1), Op("b", 1, (0,)), Op("ca", 0, (0,)), Op("cb", 0, (1,)), Op("ua", 2, (2,)), Op("ub", 2, (3,)))
    profile = Profile("key", ops, (Transfer("ga", 4, 2), Transfer("gb", 4, 3)), SECOND_A_BYTE)
    assert simulate(profile, None).step_seconds == simulate(profile, batches("ga;gb")).step_seconds == 11
    tied = replace(profile, tied=True)
    assert simulate(tied, None).step_seconds == 13
    assert simulate(tied, batches("ga;gb")).step_seconds == 11


@pytest.mark.parametrize(
    ("fusion_bytes", "made"),
    [(6, ["g0 g1 g2", "g3"]), (5, ["g0 g1", "g2 g3"]), (2, ["g0", "g1", "g2", "g3"]), (0, ["g0", "g1", "g2", "g3"])],
)
def test_horovod_fuses_up_to_the_threshold(fusion_bytes: int, made: list[str]):
    profile = layers([1, 0, 0, 0], [1, 2, 3, 2], SECOND_A_BYTE)
    outcome = simulate(profile, None, fusion_bytes=fusion_bytes)
    assert [" ".join(m.pieces) for m in outcome.messages] == made


def test_horovod_fuses_nothing_with_a_threshold_of_zero():
    assert len(simulate(layers([1, 0], [0, 0], ONE_SECOND), None, fusion_bytes=0).messages) == 2


@pytest.mark.parametrize(
    ("cycle_seconds", "made"), [(0.3, [("g0 g1", 1.1, 3.1), ("g2", 3.1, 4.1)]), (0.1, [("g0", 1, 2), ("g1 g2", 2, 4)])]
)
def test_what_becomes_ready_within_half_a_cycle_joins(cycle_seconds: float, made: list[tuple[str, float, float]]):
    profile = layers([1, 0.1, 0.1], [1, 1, 1], SECOND_A_BYTE)
    assert sent(simulate(profile, None, cycle_seconds=cycle_seconds)) == made


def test_a_message_of_horovods_is_queued_if_all_of_it_was_ready_before_the_last_one_ended():
    profile = layers([1, 0.5, 1.5], [1, 1, 1], replace(ONE_SECOND, queued_seconds=0.25))
    assert sent(simulate(profile, None)) == [("g0", 1, 2), ("g1", 2, 2.25), ("g2", 3, 4)]


@pytest.mark.parametrize(
    ("seconds", "made"),
    [
        ([1, 0.5, 0.75], [(1.5, 1.5, 2.5), (2.25, 2.5, 3)]),  # g1 joins g0; g2 is queued
        ([1, 0.75, 0.5], [(1, 1, 2), (2.25, 2.25, 3.25)]),  # g1 is queued, but g2 joins it
    ],
)
def test_a_message_of_horovods_is_not_queued_if_part_of_it_came_late(seconds: list[float], made: list[Any]):
    profile = layers(seconds, [1, 1, 1], replace(ONE_SECOND, queued_seconds=0.5))
    messages = simulate(profile, None, cycle_seconds=1.0).messages
    assert [(m.ready, m.start, m.end) for m in messages] == made


def test_the_slowest_ranks_decide_and_the_fastest_wait_for_them():
    profile = layers([1, 1], [1, 1], replace(ONE_SECOND, start_up_seconds=0.5), speeds=(2.0, 1.0, 1.0))
    outcome = simulate(profile, ONE_BY_ONE)
    assert sent(outcome) == [("g0", 2, 2.5), ("g1", 4, 4.5)]
    assert outcome.compute_seconds == approx(4)
    assert outcome.straggler_seconds == approx((2 - 1) + (4 - 2.5))
    assert outcome.exposed_seconds == approx(0.5)  # the fastest ranks also idle during g0


def test_equal_ranks_wait_for_nobody_however_many():
    profile = layers([1, 1], [1, 1], ONE_SECOND)
    outcome = simulate(profile, ONE_BY_ONE)
    assert outcome.straggler_seconds == 0
    assert simulate(replace(profile, speeds=(1.0,) * 1024), ONE_BY_ONE) == outcome


@pytest.mark.parametrize(
    ("cores", "cpu", "made"),
    [
        # The message wants f of a core, gets s = min(f, cores/(cores+1)); compute goes on at (cores-s)/cores.
        (1.0, 0.0, [("g0", 1, 3), ("g1", 3, 5)]),
        (1.0, 0.25, [("g0", 1, 3), ("g1", 3, 5)]),  # f = s = 1/4: b1 runs at 3/4, from 1 to 2 1/3
        (1.0, 1.0, [("g0", 1, 4), ("g1", 4, 6)]),  # f = 1, s = 1/2: b1 from 1 to 3, g0 by then half
        (2.0, 1.0, [("g0", 1, 3.5), ("g1", 3.5, 5.5)]),  # f = 1, s = 2/3: b1 from 1 to 2.5, g0 by then half
    ],
)
def test_a_message_and_compute_slow_each_other(cores: float, cpu: float, made: list[tuple[str, float, float]]):
    profile = layers([1, 1], [2, 2], replace(SECOND_A_BYTE, cpu_seconds_per_byte=cpu), cores=cores)
    assert sent(simulate(profile, ONE_BY_ONE)) == made


def test_a_message_that_starts_while_the_rank_computes_has_a_longer_start_up():
    profile = layers([1, 3], [2, 1], replace(SECOND_A_BYTE, busy_start_up_seconds=0.5))
    assert [(m.start, m.end) for m in simulate(profile, batches("g0;g1")).messages] == [(1, 3.5), (4, 5)]


def test_a_message_takes_longer_while_the_rank_computes_if_it_was_seen_to():
    profile = layers([1, 3], [2, 1], replace(SECOND_A_BYTE, stretch=2.0))
    (first, second) = simulate(profile, batches("g0;g1")).messages
    assert (first.start, first.end, second.end) == (1, 4.5, 5.5)  # 3 s of computing bring 1.5 of its 2 seconds


@pytest.mark.parametrize(
    ("cores", "cpu", "end"), [(1.0, 0.25, 1 + 4 / 3), (1.0, 1.0, 3), (2.0, 1.0, 2.5), (2.0, 9.0, 2.5)]
)
def test_compute_slows_down_while_a_message_takes_part_of_a_core(cores: float, cpu: float, end: float):
    profile = layers([1, 1], [2, 2], replace(SECOND_A_BYTE, cpu_seconds_per_byte=cpu), cores=cores)
    assert simulate(profile, ONE_BY_ONE, spans=True).spans == (
        Span("b0", 0, 0, approx(1)),
        Span("b1", 0, approx(1), approx(end)),
    )


def test_compute_is_as_fast_as_ever_once_the_message_is_through():
    profile = layers([1, 3], [1, 1], replace(SECOND_A_BYTE, cpu_seconds_per_byte=0.5))
    assert simulate(profile, ONE_BY_ONE).step_seconds == approx(1 + 1 + (3 - 0.5) + 1)


def test_a_rank_that_computes_slows_the_message_for_all():
    network = replace(SECOND_A_BYTE, cpu_seconds_per_byte=1.0)
    profile = layers([1, 1], [2, 1], network, speeds=(1.0, 2.0), cores=1.0)
    # From 2 on, g0 travels at 1/2, the slow rank's b1 (2 s) needs 4 s at 1/2: both end at 6.
    assert sent(simulate(profile, ONE_BY_ONE)) == [("g0", 2, 6), ("g1", 6, 7)]


def test_a_gradient_in_chunks_is_joined_by_one_copy_before_it_is_used():
    network = replace(SECOND_A_BYTE, copy_seconds_per_byte=0.5)
    profile = layers([1], [4], network, updates=[1])
    outcome = simulate(profile, batches("g0[0/2];g0[1/2]"), spans=True)
    assert sent(outcome) == [("g0[0/2]", 1, 3), ("g0[1/2]", 3, 5)]
    assert outcome.spans[1:] == (Span("c0", 0, approx(5), approx(7)), Span("u0", 0, approx(7), approx(8)))
    assert outcome.compute_seconds == approx(1 + 2 + 1)
    assert simulate(profile, batches("g0")).compute_seconds == approx(1 + 1)


def test_a_free_stream_takes_the_ready_op_that_stands_first():
    profile = layers([1, 1, 1], [1, 1], replace(ONE_SECOND, start_up_seconds=0.5), updates=[1, 1, 0])
    assert [op.name for op in profile.ops if op.seconds] == ["b0", "b1", "b2", "u0", "u1"]
    early = Profile.make(
        "key",
        [
            (o.name, o.seconds, [profile.ops[i].name for i in o.inputs], 9.0 * (o.name == "b2"), False)
            for o in profile.ops
        ],
        [(t.name, t.bytes_, profile.ops[t.op].name, t.kind, ()) for t in profile.transfers],
        profile.network,
    )
    spans = [simulate(p, ONE_BY_ONE, spans=True).spans for p in (profile, early)]
    assert [[s.name for s in run] for run in spans] == [["b0", "b1", "b2", "u0", "u1"], ["b0", "b1", "u0", "u1", "b2"]]


def test_two_streams_compute_at_once():
    ops = tuple(Op(f"x{k}", 1.0) for k in range(4))
    profile = Profile("key", ops, (), ONE_SECOND)
    assert simulate(profile, None).step_seconds == approx(4)
    outcome = simulate(profile, None, streams=2, spans=True)
    assert outcome.step_seconds == approx(2)
    assert [(s.name, s.stream, s.start) for s in outcome.spans] == [
        ("x0", 0, 0),
        ("x1", 1, 0),
        ("x2", 0, 1),
        ("x3", 1, 1),
    ]


def test_an_op_of_no_time_needs_no_stream():
    ops = (Op("long", 5.0), Op("nothing"), Op("collective", inputs=(1,)))
    profile = Profile("key", ops, (Transfer("g", 1, 2),), ONE_SECOND)
    assert sent(simulate(profile, batches("g"))) == [("g", 0, 1)]


def test_an_edge_makes_an_op_wait():
    ops = (Op("a", 1.0), Op("b", 2.0), Op("c", 3.0), Op("collective", inputs=(0,)))
    profile = Profile("key", ops, (Transfer("g", 1, 3),), ONE_SECOND)
    assert sent(simulate(profile, batches("g", edges=(("c", "a"), ("b", "c"))))) == [("g", 6, 7)]


def test_an_op_can_be_made_to_wait_for_an_arrival():
    ops = (Op("a", 1.0), Op("collective", inputs=(0,)), Op("b", 1.0))
    profile = Profile("key", ops, (Transfer("g", 1, 1),), ONE_SECOND)
    assert simulate(profile, batches("g", edges=(("collective", "b"),))).step_seconds == approx(3)


def test_another_network_can_be_asked_for():
    profile = layers([1, 1], [1, 1], ONE_SECOND)
    assert simulate(profile, ONE_BY_ONE, network=replace(ONE_SECOND, start_up_seconds=7)).step_seconds == approx(15)


def test_slack_of_a_message_is_what_the_messages_behind_it_leave():
    profile = layers([1, 1, 4], [1, 1, 1], replace(ONE_SECOND, start_up_seconds=0.5))
    messages = simulate(profile, batches("g0;g1;g2")).messages
    assert messages[0] == Message(("g0",), 1, ready=1, submitted=1, start=1, end=1.5, needed=5.5)
    assert [m.needed for m in messages] == approx([5.5, 6, 6.5])
    assert [m.slack for m in messages] == approx([4, 3.5, 0])


def test_slack_of_a_message_is_what_the_ops_behind_it_leave():
    profile = layers([1, 1], [1, 1], replace(ONE_SECOND, start_up_seconds=0.5), updates=[1, 1])
    outcome = simulate(profile, ONE_BY_ONE)  # b0 b1 u0 u1 without a pause
    assert outcome.step_seconds == approx(4)
    assert [m.needed for m in outcome.messages] == approx([2, 3])


def test_slack_of_a_message_ends_where_the_slow_ranks_need_it():
    profile = layers([1, 1], [1, 1], replace(ONE_SECOND, start_up_seconds=0.5), updates=[1, 0], speeds=(1.0, 2.0))
    outcome = simulate(profile, ONE_BY_ONE)  # slow: b0 to 2, b1 to 4, u0 to 6; fast: u0 could end at 6 too
    assert outcome.step_seconds == approx(6)
    assert [m.needed for m in outcome.messages] == approx([4, 6])


def test_slack_of_a_chunk_leaves_time_for_the_join():
    profile = layers([1], [4], replace(SECOND_A_BYTE, copy_seconds_per_byte=0.5), updates=[1])
    messages = simulate(profile, batches("g0[0/2];g0[1/2]")).messages
    assert [m.needed for m in messages] == approx([3, 5])


def test_a_plan_is_judged_alike_without_details():
    profile = layers([1, 1, 4], [1, 1, 1], replace(ONE_SECOND, queued_seconds=0.1), speeds=(1.0, 1.5))
    full = simulate(profile, batches("g0 g1;g2", 2), spans=True)
    assert full.messages
    assert full.spans
    assert simulate(profile, batches("g0 g1;g2", 2), detail=False) == replace(full, messages=(), spans=())


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (batches("g0;g1", edges=(("b0", "nobody"),)), "edges: 'nobody' is not an op"),
        (batches("g0;g1", edges=(("b1", "b0"),)), "edges: ops wait for each other in a circle: b[01], b[01]$"),
        (batches("g0;g1", edges=(("b1", "b1"),)), "in a circle: b1$"),
        (batches("g0"), "'g1' must be sent once and whole, but the plan sends nothing"),
        (batches("g0;g1;g1"), "'g1' must be sent once and whole"),
        (batches("g0;g1[0/2]"), "'g1' must be sent once and whole"),
        (batches("g0;g1;g2"), "'g2' is not a gradient of this step"),
        (BodyPlan((*ONE_BY_ONE.batches, ())), r"batches\[2\] holds no gradient"),
        (batches("g0;g1", edges=(("c1", "b0"),)), "in a circle"),
        (batches("g1;g0", edges=(("c0", "b1"),)), "can never be carried out: each of 'g1' waits"),
        (batches("g0 g1", edges=(("c0", "b1"),)), "can never be carried out"),
    ],
)
@pytest.mark.parametrize("detail", [True, False])
def test_a_plan_that_cannot_work_is_refused(plan: BodyPlan, error: str, detail: bool):
    with pytest.raises(InputError, match=error):
        simulate(layers([1, 1], [1, 1], ONE_SECOND), plan, detail=detail)


def test_a_plan_for_a_step_without_gradients_sends_nothing():
    with pytest.raises(InputError, match="is not a gradient of this step"):
        simulate(layers([1], [], ONE_SECOND), batches("g0[0/2];g0[1/2]"), detail=False)
    assert simulate(layers([1], [], ONE_SECOND), BodyPlan(())).step_seconds == 1


def test_kinds_that_cannot_share_a_message_are_refused():
    profile = layers([1, 1], [1, 1], ONE_SECOND, kinds=["float32", "float16"])
    with pytest.raises(InputError, match="'g1' cannot share a message with 'g0'"):
        simulate(profile, batches("g0 g1"))


def test_no_stream_is_an_error():
    with pytest.raises(InputError, match="streams: 0"):
        simulate(layers([1], [1], ONE_SECOND), None, streams=0)


def test_a_collective_that_takes_compute_time_is_an_error():
    ops = (Op("a", 1.0), Op("collective", 1.0, (0,)))
    with pytest.raises(InputError, match="transfer 'g': its op 'collective' must be an op of 0 seconds"):
        simulate(Profile("key", ops, (Transfer("g", 1, 1),), ONE_SECOND), None)


def test_edges_of_one_plan_do_not_stay_for_the_next():
    profile = layers([1, 1], [1, 1], ONE_SECOND)
    first = simulate(profile, ONE_BY_ONE)
    assert simulate(profile, batches("g0;g1", edges=(("c0", "b1"),))).step_seconds > first.step_seconds
    assert simulate(profile, ONE_BY_ONE) == first
