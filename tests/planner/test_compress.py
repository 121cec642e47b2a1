"""A compressed profile has the same transfers and the same step times in fewer ops."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.draw import patient, plans, profiles
from tf_caramel.planner.compress import compress
from tf_caramel.planner.plan import BodyPlan, Piece
from tf_caramel.planner.profile import InputError, Network, Op, Profile, Transfer
from tf_caramel.planner.simulate import simulate

NETWORK = Network(start_up_seconds=0.01, seconds_per_byte=1e-6, queued_seconds=0.005, cpu_seconds_per_byte=2e-7)
HALF_A_SECOND = Network(start_up_seconds=0.5, seconds_per_byte=0.0)


def random_step(seed: int, layers: int = 40, tangled: bool = True) -> Profile:
    """Forward and backward ops, a transfer a layer, updates; tangled: transfers that wait for transfers, too."""
    random = Random(seed)
    ops: list[Op] = []
    transfers: list[Transfer] = []

    def add(name: str, seconds: float, *inputs: int) -> int:
        ops.append(Op(name, seconds, tuple(sorted(set(inputs))), float(len(ops))))
        return len(ops) - 1

    at = add("begin", 0.0)
    for k in range(layers):
        for n in range(random.randint(1, 12)):
            at = add(f"f{k}.{n}", random.expovariate(1000), at, random.randrange(len(ops)))
    for k in reversed(range(layers)):
        for n in range(random.randint(1, 12)):
            waits = [at, random.randrange(len(ops))] if tangled else [at]
            at = add(f"b{k}.{n}", random.expovariate(500), *waits)
        gradient = add(f"g{k}", random.expovariate(500), at)
        collective = add(f"c{k}", 0.0, gradient)
        transfers.append(Transfer(f"g{k}", random.randint(1, 40_000), collective))
        at = add(f"joint{k}", 0.0, at, gradient) if tangled else at
        for n in range(3):
            add(f"u{k}.{n}", random.expovariate(5000), collective)
    add("end", 0.0, *(op for op, o in enumerate(ops) if o.name.startswith("u")))
    return Profile("key", tuple(ops), tuple(transfers), NETWORK, cores=2.0)


def batches_of(profile: Profile, size: int, window: int = 1, edges: tuple[tuple[str, str], ...] = ()) -> BodyPlan:
    pieces = [Piece(t.name) for t in profile.transfers]
    return BodyPlan(tuple(tuple(pieces[k : k + size]) for k in range(0, len(pieces), size)), window, edges)


def backward_edges(profile: Profile, seed: int) -> tuple[tuple[str, str], ...]:
    """The first gradient and some others are made to wait for one that would come later."""
    names = [t.name for t in profile.transfers]
    return tuple((names[k + 4], names[k]) for k in (0, *Random(seed).sample(range(1, len(names) - 4), 5)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tangled", [True, False])
def test_the_step_changes_by_less_than_a_hundredth(seed: int, tangled: bool):
    profile = random_step(seed, tangled=tangled)
    small = compress(profile)
    for size in (1, 4) if not tangled else (1,):
        for window in (1, 2):
            plan = batches_of(profile, size, window)
            assert simulate(small, plan).step_seconds == pytest.approx(simulate(profile, plan).step_seconds, rel=0.01)
    assert simulate(small, None).step_seconds == pytest.approx(simulate(profile, None).step_seconds, rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_edges_are_in_the_result(seed: int):
    profile = random_step(seed, tangled=False)
    edges = backward_edges(profile, seed)
    plan = batches_of(profile, 2, 2)
    expected = simulate(profile, batches_of(profile, 2, 2, edges)).step_seconds
    assert expected != pytest.approx(simulate(profile, plan).step_seconds, rel=0.01)
    assert simulate(compress(profile, edges), plan).step_seconds == pytest.approx(expected, rel=0.01)


def test_a_long_step_has_few_ops_left():
    profile = random_step(0, layers=200, tangled=False)
    small = compress(profile)
    assert len(profile.ops) > 3000
    assert len(small.ops) < len(profile.ops) / 3


@patient
@given(st.data())
def test_without_merging_nothing_changes(data: st.DataObject):
    profile = data.draw(profiles(speeds=(1.0, 1.5)))
    plan = data.draw(plans(profile, backwards=False))
    expected = simulate(profile, plan)
    found = simulate(compress(profile, plan.edges, grain=0.0), BodyPlan(plan.batches, plan.window))
    assert found.step_seconds == pytest.approx(expected.step_seconds)
    assert [(m.pieces, pytest.approx(m.end)) for m in found.messages] == [(m.pieces, m.end) for m in expected.messages]


@patient
@given(st.data(), st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_transfers_and_work_are_kept_and_inputs_come_first(data: st.DataObject, grain: float):
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    small = compress(profile, plan.edges, grain)
    assert small.compute_seconds == pytest.approx(profile.compute_seconds)
    assert sorted((t.name, t.bytes_, t.kind) for t in small.transfers) == sorted(
        (t.name, t.bytes_, t.kind) for t in profile.transfers
    )
    assert all(i < k for k, op in enumerate(small.ops) for i in op.inputs)
    longest = max(op.seconds for op in profile.ops)
    assert all(op.seconds <= max(longest, grain * profile.compute_seconds) + 1e-9 for op in small.ops)
    assert {op.name for op in small.ops} <= {op.name for op in profile.ops}
    assert len({op.name for op in small.ops}) == len(small.ops)
    simulate(small, BodyPlan(plan.batches, plan.window))  # ends


def step_of(ops: tuple[Op, ...], **collectives: int) -> Profile:
    """Collectives: the names of transfers of 1 byte, and the positions of their ops."""
    return Profile("key", ops, tuple(Transfer(name, 1, op) for name, op in collectives.items()), HALF_A_SECOND)


def test_the_chain_becomes_one_op_if_the_grain_allows_it():
    ops = (Op("a", 1.0), Op("b", 2.0), Op("c", 1.0), Op("collective", inputs=(0, 2)))
    profile = step_of(ops, g=3)
    assert compress(profile, grain=0.75).ops == (Op("b", 3.0), Op("c", 1.0, (0,)), Op("collective", inputs=(1,)))
    assert compress(profile, grain=1.0).ops == (Op("c", 4.0), Op("collective", inputs=(0,)))


def test_ops_of_no_time_are_left_out():
    ops = (
        Op("a", 1.0),
        Op("none", inputs=(0,)),
        Op("collective", inputs=(1,)),
        Op("also", inputs=(2,)),
        Op("b", 1.0, (3,)),
    )
    assert compress(step_of(ops, g=2)).ops == (Op("a", 1.0), Op("collective", inputs=(0,)), Op("b", 1.0, (1,)))


def test_what_waits_for_transfers_keeps_its_turn():
    chain = (Op("b0", 1.0), Op("b1", 1.0, (0,)), Op("b2", 1.0, (1,)), Op("c0", inputs=(0,)), Op("c2", inputs=(2,)))
    profile = step_of((*chain, Op("u0", 5.0, (3,))), g0=3, g2=4)
    plan = BodyPlan(((Piece("g0"),), (Piece("g2"),)))
    assert simulate(profile, plan).messages[1].start == 3
    assert simulate(compress(profile), plan).messages[1].start == 3


def test_what_waits_for_transfers_does_not_overtake_an_op_that_an_edge_moved_back():
    chain = (Op("moved", 1.0), Op("c0"), Op("u0", 5.0, (1,)), Op("b0", 1.0), Op("b1", 1.0), Op("c1", inputs=(0,)))
    profile, edges = step_of(chain, g0=1, g1=5), (("b1", "moved"),)
    network = Network(start_up_seconds=1.5, seconds_per_byte=0.0)
    messages = (((Piece("g0"),), (Piece("g1"),)), 1)
    assert simulate(profile, BodyPlan(*messages, edges), network=network).messages[1].start == 3
    assert simulate(compress(profile, edges), BodyPlan(*messages), network=network).messages[1].start == 3


def test_what_waits_longer_by_an_edge_is_not_merged_with_what_stands_before_it():
    ops = (Op("c0"), Op("u0", 2.0, (0,)), Op("u1", 1.0, (0,)), Op("b0", 1.0), Op("b1", 1.0))
    small = compress(step_of(ops, g0=0), (("b1", "u1"),), grain=1.0)
    assert [(op.name, op.inputs) for op in small.ops] == [("c0", ()), ("u0", (0,)), ("b1", ()), ("u1", (0, 2))]


def test_ops_that_wait_for_the_same_are_merged_but_not_with_one_that_feeds_a_transfer():
    ops = (Op("c0"), Op("x", 1.0, (0,)), Op("c1", inputs=(1,)), Op("y", 1.0, (0,)), Op("z", 1.0, (0,)))
    assert compress(step_of(ops, g0=0, g1=2), grain=1.0).ops == (
        Op("c0"),
        Op("x", 1.0, (0,)),
        Op("c1", inputs=(1,)),
        Op("z", 2.0, (0,)),
    )


def test_merging_around_an_op_makes_no_circle():
    ops = (Op("c0"), Op("x", 1.0, (0,)), Op("y", 1.0, (0,)), Op("free", 1.0), Op("z", 1.0, (1,)))
    profile, edges = step_of(ops, g0=0), (("z", "y"),)
    small = compress(profile, edges, grain=2.0)
    assert small.compute_seconds == 4
    assert simulate(small, BodyPlan(((Piece("g0"),),))).step_seconds == 4


def test_an_op_that_many_wait_for_and_that_waits_for_many_stays():
    begin = [Op(f"c{k}") for k in range(9)]
    end = [Op(f"u{k}", 1.0, (9,)) for k in range(9)]
    profile = Profile(
        "key",
        (*begin, Op("all", inputs=tuple(range(9))), *end),
        tuple(Transfer(f"g{k}", 1, k) for k in range(9)),
        NETWORK,
    )
    small = compress(profile)
    assert sum(len(op.inputs) for op in small.ops) == 9 + 8 + 1
    assert "u8" in {op.name for op in small.ops}


def test_a_circle_of_edges_is_refused():
    profile = Profile("key", (Op("a", 1.0), Op("b", 1.0, (0,))), (), NETWORK)
    with pytest.raises(InputError, match="in a circle"):
        compress(profile, (("b", "a"),))
