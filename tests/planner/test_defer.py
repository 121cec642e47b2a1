"""Deferral: the retimed step, which transfers are deferred, and what that is worth on steps with known best answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.draw import EIGHTHS, patient
from tests.planner.profiles import GIGABIT, layered, resnet_like
from tf_caramel.planner.compress import compress
from tf_caramel.planner.decide import WORTH_DEFERRING, decide, loosened, parse
from tf_caramel.planner.defer import deferrable, obstacles, order_of, retime
from tf_caramel.planner.moves import chunked, neighbours
from tf_caramel.planner.order import Order, fifo, submission
from tf_caramel.planner.plan import BodyPlan, Piece, Plan, check
from tf_caramel.planner.profile import InputError, Network, Op, Profile, Transfer
from tf_caramel.planner.search import body_plan
from tf_caramel.planner.simulate import simulate
from tf_caramel.planner.structure import levels

MB = 2**20
SECOND_A_BYTE = Network(start_up_seconds=0.0, seconds_per_byte=1.0)


def all_deferrable(profile: Profile) -> Profile:
    return replace(profile, transfers=tuple(replace(t, deferrable=True) for t in profile.transfers))


def equal_layers(count: int, forward: float, bytes_: int, network: Network = SECOND_A_BYTE) -> Profile:
    """A chain of layers with one forward op and one backward op of twice the time each; updates take no time."""
    ops = [(f"f{k}", forward, [f"f{k - 1}"] if k else [], float(k), False) for k in range(count)]
    for n, k in enumerate(reversed(range(count))):
        before = f"b{k + 1}" if n else f"f{k}"
        ops.append((f"b{k}", 2 * forward, [before], float(count + n), False))
        ops.append((f"c{k}", 0.0, [f"b{k}"], float(count + n), False))
        ops.append((f"u{k}", 0.0, [f"c{k}"], float(count + n), False))
    names = [f"g{k}" for k in range(count)]
    transfers = [(f"g{k}", bytes_, f"c{k}", "float32", [f"f{k}"]) for k in range(count)]
    return Profile.make("equal", ops, transfers, network, deferrable=names)


def step(profile: Profile, plan: BodyPlan | None) -> float:
    return simulate(profile, plan, detail=False).step_seconds


def plan_of(text: str, deferred: int = 0) -> BodyPlan:
    """ "g2;g1 g0": batches, pieces."""
    return BodyPlan(tuple(tuple(map(Piece.parse, b.split())) for b in text.split(";")), deferred=deferred)


def named(profile: Profile) -> dict[str, list[str]]:
    return {op.name: [profile.ops[i].name for i in op.inputs] for op in profile.ops}


@st.composite
def steps(draw: st.DrawFn, cpu: bool = True) -> Profile:
    """A forward and a backward pass of ops that wait for any before them, with a transfer behind some of the latter,
    updates of one or two ops, metrics, and an op that ends the step; some transfers are deferrable."""
    ops: list[Op] = []

    def op(name: str, seconds: float, inputs: Sequence[int] = ()) -> int:
        ops.append(Op(name, seconds, tuple(sorted(set(inputs))), start=float(len(ops))))
        return len(ops) - 1

    def some(at_most: int = 3) -> list[int]:
        return sorted(draw(st.sets(st.sampled_from(passes), max_size=at_most))) if passes else []

    passes: list[int] = []
    for k in range(draw(st.integers(1, 6))):
        passes.append(op(f"f{k}", draw(EIGHTHS), some()))
    forward = list(passes)
    transfers, ends = [], []
    for k in range(draw(st.integers(0, 5))):
        passes.append(op(f"b{k}", draw(EIGHTHS), some()))
        collective = op(f"c{k}", 0.0, [passes[-1]])
        last = collective
        for n in range(draw(st.integers(0, 2))):
            last = op(f"u{k}.{n}", draw(EIGHTHS), [last, *some(1)])
        ends.append(last)
        readers = tuple(sorted(draw(st.sets(st.sampled_from(forward), max_size=2))))
        kind = draw(st.sampled_from(["a", "b", None]))
        transfers.append(Transfer(f"g{k}", draw(st.integers(0, 8)), collective, kind, readers, draw(st.booleans())))
    op("end", 0.0, [*ends, passes[-1]])
    times = [draw(EIGHTHS) for _ in range(4)]
    network = Network(times[0], times[1], draw(st.none() | EIGHTHS), *(times[2:] if cpu else ()))
    return Profile("key", tuple(ops), tuple(transfers), network, speeds=(1.0,))


# The retimed step


def test_a_deferred_transfer_starts_at_once_and_the_readers_of_its_parameter_wait_for_its_update():
    there = retime(equal_layers(2, 1.0, 1), ["g1"])
    assert named(there) == {
        "c1": [], "u1": ["c1"], "f0": [], "f1": ["u1", "f0"], "b1": ["f1"], "b0": ["b1"], "c0": ["b0"], "u0": ["c0"]
    }  # fmt: skip
    assert [op.name for op in there.ops][:2] == ["c1", "u1"]
    assert {t.name: [there.ops[r].name for r in t.readers] for t in there.transfers} == {"g1": ["f1"], "g0": ["f0"]}


def test_an_update_keeps_only_what_comes_after_its_own_transfer():
    ops = [("rate", 1.0, []), ("b", 1.0, []), ("c", 0.0, ["b"]), ("m", 1.0, ["c"]), ("u", 1.0, ["m", "c", "rate"])]
    ops += [("slot", 1.0, ["m", "rate"]), ("f", 1.0, [])]
    made = [(*op, float(k), False) for k, op in enumerate(ops)]
    found = named(retime(Profile.make("k", made, [("g", 1, "c", "float32", ["f"])], SECOND_A_BYTE), ["g"]))
    assert found == {
        "c": [], "m": ["c"], "u": ["c", "m"], "slot": ["m"], "rate": [], "b": [], "f": ["u", "slot"]
    }  # fmt: skip


def test_readers_of_a_transfer_without_updates_wait_for_the_transfer_and_of_several_for_each():
    made = [("f", 1.0, [], 0.0, False), ("b", 1.0, ["f"], 1.0, False)]
    made += [(c, 0.0, ["b"], 2.0, False) for c in ("c", "d")]
    transfers = [(f"g{c}", 1, c, "float32", ["f"]) for c in ("c", "d")]
    there = retime(Profile.make("k", made, transfers, SECOND_A_BYTE), ["gc", "gd"])
    assert sorted(named(there)["f"]) == ["c", "d"]


def shared_update(seconds: float) -> Profile:
    made = [("b", 1.0, [], 0.0, False), ("c", 0.0, ["b"], 1.0, False), ("d", 0.0, ["b"], 1.0, False)]
    made += [("norm", seconds, ["c", "d"], 2.0, False), ("e", 0.0, ["b"], 3.0, False)]
    transfers = [(f"g{c}", 1, c, "float32", []) for c in "cde"]
    return Profile.make("k", made, transfers, SECOND_A_BYTE, deferrable=["gc", "gd", "ge"])


def test_what_has_an_update_in_common_with_another_is_not_deferrable_and_the_error_says_why():
    profile = shared_update(1.0)
    assert deferrable(profile) == ("ge",)
    with pytest.raises(InputError, match=r"'gc' cannot be deferred: the op 'norm' waits for it and for 'gd'"):
        retime(profile, ["gc"])
    assert set(obstacles(profile)) == {"gc", "gd"}


def test_an_op_that_only_ends_the_step_does_not_stop_deferral():
    assert deferrable(shared_update(0.0)) == ("gc", "gd", "ge")
    assert named(retime(shared_update(0.0), ["gc"]))["norm"] == ["d"]


def test_an_update_that_reads_the_parameter_of_another_is_not_deferrable():
    profile = equal_layers(2, 1.0, 1)
    place = {op.name: k for k, op in enumerate(profile.ops)}
    reading = tuple(replace(t, readers=(place["u0"],)) if t.name == "g1" else t for t in profile.transfers)
    assert deferrable(replace(profile, transfers=reading)) == ("g1",)


def test_what_is_not_there_or_deferred_already_is_an_error():
    profile = equal_layers(2, 1.0, 1)
    with pytest.raises(InputError, match="'lost' is not a gradient of this step"):
        retime(profile, ["lost"])
    with pytest.raises(InputError, match="deferred already"):
        retime(retime(profile, ["g0"]), ["g1"])


def test_a_retimed_step_is_kept_with_its_profile_and_told_apart_by_what_is_deferred():
    profile = equal_layers(3, 1.0, 1)
    assert retime(profile, ["g1", "g0"]) is retime(profile, ["g0", "g1"]) is not retime(profile, ["g0"])
    assert retime(profile, []) is profile


def test_the_passes_of_a_retimed_step_are_still_its_passes():
    """Else a message's start-up would not take longer while they run, and orders would have nothing to order."""
    profile = equal_layers(4, 1.0, 1, replace(SECOND_A_BYTE, busy_start_up_seconds=2.0))
    there = retime(profile, ["g0", "g3"])
    level = dict(zip((op.name for op in there.ops), levels(there), strict=True))
    assert {name for name, n in level.items() if not n} == {
        *(f"{kind}{k}" for kind in "fb" for k in range(4)),
        *("c1", "c2"),
    }
    assert {name for name, n in level.items() if n < 0} == {"c0", "u0", "c3", "u3"}
    assert simulate(profile, plan_of("g0;g3;g2;g1", 2)).messages[0].end == 3.0


@patient
@given(steps(), st.data())
def test_a_retimed_step_has_the_same_work_and_ends(profile: Profile, data: st.DataObject):
    names = [name for name in deferrable(profile) if data.draw(st.booleans())]
    there = retime(profile, names)
    assert sorted((op.name, op.seconds) for op in there.ops) == sorted((op.name, op.seconds) for op in profile.ops)
    assert there.bytes_ == profile.bytes_
    assert all(i < k for k, op in enumerate(there.ops) for i in op.inputs)
    plan = decide(there, "fifo", "none")
    for step_ in (there, compress(there)):
        outcome = simulate(step_, plan)
        assert sum(m.bytes_ for m in outcome.messages) == profile.bytes_
        assert all(m.ready == 0 for m in outcome.messages if m.pieces[0] in names)


@patient
@given(steps(cpu=False), st.sampled_from(["none", "fixed:3B", "mgwfbp", "adaptive"]))
def test_no_step_is_shorter_than_its_compute_or_its_messages(profile: Profile, batches: str):
    outcome = simulate(profile, decide(profile, "caramel", batches, defer=True))
    least = min(profile.network.start_up_seconds, profile.network.seconds(0, queued=True))
    travel = profile.network.seconds_per_byte * profile.bytes_ + least * len(outcome.messages)
    assert outcome.step_seconds >= max(profile.compute_seconds, travel) - 1e-9


# What deferral is worth


def best_of_all(profile: Profile) -> float:
    """Every set of deferred gradients, each gradient a message."""
    found = [step(profile, decide(profile, "fifo", "none"))]
    names = [t.name for t in profile.transfers]
    for n in range(1, 2 ** len(names)):
        there = retime(profile, [name for k, name in enumerate(names) if n >> k & 1])
        items = submission(there, order_of(there, profile, fifo(profile)))
        found.append(step(there, body_plan(tuple((item,) for item in items), 1)))
    return min(found)


@pytest.mark.parametrize("bytes_", [1, 2, 3, 4, 8])
def test_a_chain_of_equal_layers_without_and_with_deferral(bytes_: int):
    """8 layers of 1 s forward and 2 s backward, `bytes_` seconds of network each. Without deferral the first gradient
    is ready at 10 s; either the network never rests from then on, or the last one travels when computing is over.
    """
    profile = equal_layers(8, 1.0, bytes_)
    plain, deferring = decide(profile), decide(profile, defer=True)
    compute, network = 24.0, 8.0 * bytes_
    assert step(profile, plain) == pytest.approx(max(10 + network, compute + bytes_))
    assert max(compute, network) <= step(profile, deferring) <= best_of_all(profile) + 1e-9
    assert bool(deferring.deferred) == (step(profile, deferring) < step(profile, plain)) == (bytes_ > 2)


@pytest.mark.parametrize("batches", ["none", "fixed:9B", "mgwfbp"])
def test_the_other_batchings_defer_what_suits_them(batches: str):
    profile = equal_layers(8, 1.0, 4, replace(SECOND_A_BYTE, start_up_seconds=0.5))
    plan = decide(profile, "fifo", batches, defer=True)
    assert step(profile, plan) < 0.93 * step(profile, decide(profile, "fifo", batches))
    sides = [[p.transfer in plan.deferred_transfers for p in batch] for batch in plan.batches]
    assert all(len(set(side)) == 1 for side in sides)
    assert max(map(len, sides)) == {"none": 1, "fixed:9B": 2}.get(batches, max(map(len, sides)))


def test_a_step_that_was_traced_with_all_updates_tied_can_be_deferred():
    profile = replace(equal_layers(8, 1.0, 4), tied=True)
    assert step(profile, decide(profile, defer=True)) <= 36


def test_if_the_network_is_slower_it_never_rests():
    profile = equal_layers(8, 1.0, 4)
    assert step(profile, decide(profile)) == pytest.approx(10 + 32)
    assert step(profile, decide(profile, defer=True)) <= 36
    # Every second gradient deferred, g1 arrives at 4 s: f0 at 1, 4 to 5, wait for g3 until 8, for g5 until 12.
    assert step(profile, plan_of("g1;g3;g5;g7;g6;g4;g2;g0", 4)) == pytest.approx(16 + 1 + 2 * 2 + 4 * 4)


def test_if_all_is_hidden_nothing_is_deferred():
    profile = equal_layers(8, 1.0, 1, replace(SECOND_A_BYTE, seconds_per_byte=1e-6))
    plan = decide(profile, defer=True)
    assert (plan.deferred, plan) == (0, decide(profile))


def test_what_the_forward_pass_comes_to_last_travels_in_it():
    """A large gradient of the last layer, ready first: half of a step's network time fits before that layer's turn."""
    profile = all_deferrable(layered([(1.0, 1, 0)] * 6 + [(0.1, 6, 0), (0.1, 6, 0)], SECOND_A_BYTE))
    plan = decide(profile, defer=True)
    assert step(profile, plan) <= 0.93 * step(profile, decide(profile))
    assert "layer7/kernel" in plan.deferred_transfers or "layer6/kernel" in plan.deferred_transfers
    uses = [int(p.transfer[5]) for batch in plan.batches[: plan.deferred] for p in batch]
    assert uses == sorted(uses)


def test_of_the_messages_of_the_head_the_first_is_small():
    """All deferred: merged into one message the forward pass would wait for all bytes."""
    profile = retime(equal_layers(6, 4.0, 3, replace(SECOND_A_BYTE, start_up_seconds=1.0)), [f"g{k}" for k in range(6)])
    plan = decide(profile, "fifo", "mgwfbp")
    sizes = [sum(1 for _ in batch) for batch in plan.batches]
    assert (sizes[0], plan.batches[0][0].transfer, plan.deferred) == (1, "g0", len(plan.batches))
    best = min(
        step(profile, BodyPlan(tuple(tuple(Piece(f"g{k}") for k in range(a, b)) for a, b in pairwise(cuts))))
        for n in range(2**5)
        for cuts in [[0, *(k + 1 for k in range(5) if n >> k & 1), 6]]
    )
    assert step(profile, plan) == pytest.approx(best)


def test_what_is_deferred_goes_one_by_one_without_a_window_too():
    """Fused, the two at the head would keep the first layer waiting for both, and the step would take 17 s."""
    profile = equal_layers(4, 1.0, 2)
    outcome = simulate(profile, replace(plan_of("g0;g1;g3;g2", deferred=2), window=0))
    assert [m.pieces for m in outcome.messages] == [("g0",), ("g1",), ("g3",), ("g2",)]
    assert [m.deferred for m in outcome.messages] == [True, True, False, False]
    assert outcome.step_seconds == 15


def test_with_a_wider_window_what_is_deferred_goes_one_by_one_too():
    profile = equal_layers(5, 1.0, 2)
    plan = replace(plan_of("g0;g1;g2;g4;g3", deferred=3), window=2)
    assert [m.submitted for m in simulate(profile, plan).messages][:3] == [0, 2, 4]


def test_what_is_deferred_is_not_cut_into_chunks():
    profile = retime(equal_layers(4, 1.0, 100, replace(SECOND_A_BYTE, start_up_seconds=1.0)), ["g0", "g1"])
    items = submission(profile, order_of(profile, equal_layers(4, 1.0, 100), fifo(equal_layers(4, 1.0, 100))))
    made = list(chunked(tuple((item,) for item in items), profile.network))
    cut = {item.piece.transfer for batches in made for batch in batches for item in batch if item.piece.parts > 1}
    assert cut == {"g2", "g3"}


def test_without_a_window_chunks_of_what_is_deferred_go_one_by_one_and_those_of_the_rest_together():
    profile = equal_layers(2, 1.0, 4)  # g1 is ready at 7 and travels to 11; g0, deferred, to 4
    late = replace(plan_of("g0;g1[0/2];g1[1/2]", deferred=1), window=0)
    outcome = simulate(profile, late)
    assert [(m.pieces, m.deferred) for m in outcome.messages] == [(("g0",), True), (("g1[0/2]", "g1[1/2]"), False)]
    two = replace(plan_of("g0[0/2];g0[1/2];g1", deferred=2), window=0)
    assert [m.pieces for m in simulate(profile, two).messages] == [("g0[0/2]",), ("g0[1/2]",), ("g1",)]


def test_a_loosened_plan_keeps_its_head_and_sends_the_rest_whole_and_alone():
    plan = replace(plan_of("g0;g1 g2;g5[0/2] g4;g5[1/2];g3", deferred=2), edges=(("a", "b"),), window=2)
    assert loosened(plan) == replace(plan_of("g0;g1 g2;g5;g4;g3", deferred=2), window=0)


@pytest.mark.parametrize("bytes_", [4, 6])
def test_a_loosened_plan_can_be_run(bytes_: int):
    profile = equal_layers(8, 1.0, bytes_)
    loose = loosened(decide(profile, defer=True))
    check(Plan((loose,)), [{t.name: t.kind for t in profile.transfers}])
    assert loose.deferred
    assert step(profile, loose) < step(profile, None)


def test_only_what_is_known_to_be_deferrable_is_deferred():
    profile = equal_layers(8, 1.0, 4)
    some = replace(profile, transfers=tuple(replace(t, deferrable=t.name in ("g3", "g5")) for t in profile.transfers))
    assert set(decide(some, defer=True).deferred_transfers) == {"g3", "g5"}
    none = replace(profile, transfers=tuple(replace(t, deferrable=False) for t in profile.transfers))
    assert decide(none, defer=True) == decide(none)


def test_a_gain_that_is_not_worth_the_memory_is_left():
    profile = equal_layers(8, 1.0, 4)
    tiny = replace(profile, ops=(*profile.ops, Op("rest", 1e6)))  # computing that hides everything
    assert decide(tiny, defer=True).deferred == 0
    assert 0 < WORTH_DEFERRING < 0.01


@settings(max_examples=60, deadline=None)
@given(
    steps(),
    st.sampled_from(["fifo", "tac", "caramel"]),
    st.sampled_from(["none", "fixed:3B", "mgwfbp,window=2", "adaptive"]),
    st.sampled_from(["full", "quick"]),
)
def test_deciding_with_deferral_is_never_slower_than_without(profile: Profile, order: str, batches: str, effort: str):
    plan = decide(profile, order, batches, effort, defer=True)
    assert step(profile, plan) <= step(profile, decide(profile, order, batches, effort)) + 1e-9
    flagged = {t.name: "it is not" for t in profile.transfers if not t.deferrable}
    check(Plan((plan,)), [{t.name: t.kind for t in profile.transfers}], obstacles=[flagged])
    assert plan == decide(profile, *parse(f"{order},{batches},defer"), effort=effort)


@given(st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None)
def test_the_plan_does_not_depend_on_the_order_of_the_file(random):
    network = replace(GIGABIT, seconds_per_byte=3e-8)
    profile = all_deferrable(layered([(0.01, MB, 1), (0.005, 2 * MB, 0), (0.01, MB, 1)] * 2, network, small_bytes=100))
    data = json.loads(profile.to_json())
    random.shuffle(data["ops"])
    random.shuffle(data["transfers"])
    for op in data["ops"]:
        random.shuffle(op["inputs"])
    plan = decide(profile, defer=True)
    assert plan.deferred
    assert decide(Profile.from_json(json.dumps(data)), defer=True) == plan


def test_a_net_like_resnet_comes_close_to_the_bound_of_its_link():
    profile = all_deferrable(resnet_like())
    plain, deferring = (step(profile, decide(profile, defer=defer)) for defer in (False, True))
    bound = profile.network.seconds(profile.bytes_)
    assert deferring - bound < 0.3 * (plain - bound)


def test_what_is_deferred_goes_in_order_of_first_use_whatever_the_order_of_the_rest():
    profile = equal_layers(4, 1.0, 1)
    there = retime(profile, ["g0", "g1", "g3"])
    urgent = Order((0, 1, 2, 3))  # of g3, g2, g1, g0
    items = submission(there, order_of(there, profile, urgent))
    assert [(item.piece.transfer, item.level, item.due) for item in items] == [
        ("g0", -1, 0.0), ("g1", -1, 1.0), ("g3", -1, 3.0), ("g2", 0, 0.0)
    ]  # fmt: skip


def test_the_local_search_splits_the_head_of_the_first_batch_only_if_it_is_deferred():
    there = retime(equal_layers(7, 1.0, 1), [f"g{k}" for k in range(7)])
    items = submission(there, order_of(there, there, fifo(there)))
    head = {len(found[0]) for found in neighbours((items[:5], items[5:]))}
    assert {1, 2, 4} <= head
    rest = submission(equal_layers(7, 1.0, 1), fifo(there))
    assert 1 not in {len(found[0]) for found in neighbours((rest[:5], rest[5:]))}


# The plan and the profile as data


def test_the_simulator_retimes_by_itself_and_says_what_is_deferred():
    profile = equal_layers(3, 1.0, 2)
    plan = plan_of("g1;g2;g0", 1)
    outcome = simulate(profile, plan, spans=True)
    assert outcome == replace(simulate(retime(profile, ["g1"]), plan, spans=True))
    assert [(m.pieces, m.deferred, m.ready, m.start) for m in outcome.messages] == [
        (("g1",), True, 0.0, 0.0), (("g2",), False, 6.0, 6.0), (("g0",), False, 10.0, 10.0)
    ]  # fmt: skip
    assert outcome.deferred_bytes == 2
    assert outcome.messages[0].slack == 0.0  # f1 could begin at 1 s
    assert outcome.step_seconds == 12.0  # 2 for g1, f1, f2, three backward ops of 2 s, g0
    assert simulate(profile, plan_of("g2;g1;g0")).deferred_bytes == 0


def test_chunks_of_a_deferred_gradient_are_joined_before_its_update():
    profile = equal_layers(2, 1.0, 4, replace(SECOND_A_BYTE, copy_seconds_per_byte=0.25))
    outcome = simulate(profile, plan_of("g1[0/2];g1[1/2];g0", 2))
    assert outcome.messages[2].ready == 4 + 1 + 1 + 4  # travel, join, f1, backward


def test_a_profile_keeps_what_is_deferrable_and_deferred():
    profile = equal_layers(2, 1.0, 1)
    some = replace(profile, transfers=tuple(replace(t, deferrable=t.name == "g1") for t in profile.transfers))
    assert Profile.from_json(some.to_json()) == some
    there = retime(some, ["g1"])
    assert Profile.from_json(there.to_json()) == there
    assert '"deferrable"' not in replace(profile, transfers=()).to_json()


def test_a_name_that_is_no_transfer_is_not_deferrable():
    with pytest.raises(InputError, match="'lost' is called deferrable, but it is no transfer"):
        Profile.make("k", [("a", 0.0, [], 0.0, False)], [], SECOND_A_BYTE, deferrable=["lost"])
    data = json.loads(equal_layers(1, 1.0, 1).to_json())
    with pytest.raises(InputError, match=r"p\.json: deferred: 'lost', but it must be a transfer"):
        Profile.from_json(json.dumps(data | {"deferred": ["lost"]}), "p.json")


@pytest.mark.parametrize("text", ["fifo,none,defer", "tac,mgwfbp,window=2,defer", "caramel,adaptive,defer"])
def test_deferral_is_an_option_of_the_batches(text: str):
    assert parse(text) == tuple(text.split(",", 1))


def test_an_option_twice_is_refused():
    with pytest.raises(InputError, match="'defer' in 'none,defer,defer' is not an option"):
        parse("fifo,none,defer,defer")
