"""analysis: what is said of each collective of a body, and which bodies lead to one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graph_passes.analysis import Collective, collectives, leads_to_collective
from tests.graph_passes.graphs import allreduce, batch, body, branch, call, identity, module, node, show


def only(collective: Any, signature: str = "x y -> x") -> Collective:
    (found,) = collectives(body("step", signature, collective))
    return found


def test_a_collective_is_described():
    step = body("step", "x -> r", identity("g", "x"), allreduce("s/r", "g", "3,4", "/gpu:0"))
    settings = (("reduce_op", 1.0), ("prescale_factor", 1.0), ("postscale_factor", 1.0), ("process_set_id", 0.0))
    assert collectives(step) == [
        Collective(
            node="s/r", key="r", op="HorovodAllreduce", dtype="float32", shapes=("3,4",), bytes_=48, settings=settings,
            device="/gpu:0", ready=100_000, terminal=True, planned=False,
        )
    ]  # fmt: skip


def test_a_body_without_collectives_has_none():
    assert collectives(body("step", "x -> a", identity("a", "x"))) == []


def test_collectives_come_in_the_order_in_which_they_were_traced():
    step = body("step", "x -> z", allreduce("z", "b"), identity("b", "x"), allreduce("a", "x"))
    assert [c.node for c in collectives(step)] == ["z", "a"]


def test_looking_changes_nothing():
    step = body("step", "x -> r", allreduce("r", "x"), call("c", "leaf", "r"))
    before = show(step)
    assert len(collectives(step)) == 1
    assert leads_to_collective(module(step))["step"]
    assert show(step) == before


@pytest.mark.parametrize(("name", "key"), [("r", "r"), ("a/b/r_1", "r_1")])
def test_the_key_is_the_name_after_the_last_slash(name: str, key: str):
    assert only(allreduce(name, "x")).key == key


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [("DT_FLOAT", "float32", 4), ("DT_DOUBLE", "float64", 8), ("DT_HALF", "float16", 2), ("DT_BFLOAT16", "bfloat16", 2),
     ("DT_INT64", "int64", 8), ("DT_UINT8", "uint8", 1)],
)  # fmt: skip
def test_bytes_follow_the_dtype(dtype: str, name: str, size: int):
    found = only(allreduce("r", "x", "10", T=dtype))
    assert (found.dtype, found.bytes_) == (name, 10 * size)


@pytest.mark.parametrize(
    ("shape", "shapes", "size"),
    [
        ("", ("",), 4),
        ("3,4", ("3,4",), 48),
        ("3,0", ("3,0",), 0),
        ("?", (None,), None),
        ("?,4", ("?,4",), None),
    ],
)
def test_bytes_are_those_of_the_shape_or_unknown(shape: str, shapes: Any, size: int | None):
    found = only(allreduce("r", "x", shape))
    assert (found.shapes, found.bytes_) == (shapes, size)


@pytest.mark.parametrize(("shape", "size"), [("3;5,2", 52), ("3;?", None)])
def test_a_grouped_all_reduce_sends_the_sum_of_its_inputs(shape: str, size: int | None):
    assert only(allreduce("r", "x y", shape)).bytes_ == size


def test_a_collective_traced_without_shapes_has_unknown_ones():
    found = only(node("r", "HorovodGroupedAllreduce", "x y", T="DT_FLOAT"))
    assert (found.shapes, found.bytes_) == ((None, None), None)


def test_settings_that_a_node_does_not_have_are_left_out():
    found = only(node("r", "HorovodAllgather", "x", T="DT_FLOAT", process_set_id=2))
    assert found.settings == (("process_set_id", 2.0),)


def by_readiness(*nodes: Any) -> list[str]:
    return [c.node for c in sorted(collectives(body("step", "x -> x", *nodes)), key=lambda c: c.ready)]


def test_a_collective_is_ready_when_its_producer_has_run():
    gradients = [identity("g0", "x"), identity("g1", "g0"), identity("g2", "g1")]
    reductions = [allreduce("r2", "g2"), allreduce("r0", "g0"), allreduce("r1", "g1")]
    assert by_readiness(*gradients, *reductions) == ["r0", "r1", "r2"]


def test_a_grouped_collective_is_ready_when_its_last_producer_has_run():
    gradients = [identity("g0", "x"), identity("g1", "g0"), identity("g2", "g1")]
    assert by_readiness(*gradients, allreduce("r", "g2 g0"), allreduce("s", "g1")) == ["s", "r"]


def test_of_the_outputs_of_one_call_those_with_higher_numbers_are_ready_first():
    reductions = [allreduce("r0", "c"), allreduce("r1", "c:1"), allreduce("r2", "c:2")]
    assert by_readiness(call("c", "backward", "x"), *reductions) == ["r2", "r1", "r0"]


def test_a_group_of_one_call_s_outputs_is_ready_with_the_lowest_number():
    reductions = [allreduce("r", "c:2 c"), allreduce("s", "c:1")]
    assert by_readiness(call("c", "backward", "x"), *reductions) == ["s", "r"]


def terminal(*nodes: Any) -> dict[str, bool]:
    return {c.node: c.terminal for c in collectives(body("step", "x -> x", *nodes))}


def test_an_all_reduce_that_feeds_another_collective_is_not_terminal():
    nodes = [allreduce("r", "x"), identity("a", "r"), allreduce("s", "a"), allreduce("t", "x")]
    assert terminal(*nodes) == {"r": False, "s": True, "t": True}


def test_an_all_reduce_that_another_collective_waits_for_is_not_terminal():
    assert terminal(allreduce("r", "x"), node("s", "HorovodAllgather", "x ^r")) == {"r": False, "s": True}


def test_a_collective_of_a_plan_is_known_as_planned():
    step = body("step", "x y -> m n", batch("m", "a", "x"), allreduce("n", "y"))
    assert {c.node: c.planned for c in collectives(step)} == {"m": True, "n": False}


def test_a_signature_holds_what_is_equal_on_every_rank_and_nothing_local():
    step = body("step", "x -> r", identity("g", "x"), allreduce("s/r", "g", "3,4"))
    assert collectives(step)[0].signature() == {
        "key": "r", "op": "HorovodAllreduce", "dtype": "float32", "shapes": ["3,4"], "device": "",
        "settings": {"reduce_op": 1.0, "prescale_factor": 1.0, "postscale_factor": 1.0, "process_set_id": 0.0},
    }  # fmt: skip


def test_a_signature_is_plain_data():
    signature = only(allreduce("r", "x y", "3;?")).signature()
    assert json.loads(json.dumps(signature)) == signature


@pytest.mark.parametrize(
    ("op", "shape", "signed"),
    [("HorovodAllgather", "7,4,2", "4,2"), ("HorovodGroupedAllgather", "7", ""), ("HorovodAllgather", "?", None),
     ("HorovodReducescatter", "7,4", "7,4"), ("HorovodAllreduce", "7,4", "7,4")],
)  # fmt: skip
def test_the_first_dimension_of_an_all_gather_is_each_rank_s_own(op: str, shape: str, signed: str | None):
    found = only(node("r", op, "x", T="DT_FLOAT", _caramel_shapes=[shape]))
    assert found.signature()["shapes"] == [signed]


def test_a_body_leads_to_a_collective_through_calls_and_branches():
    reduce = body("reduce", "g -> r", allreduce("r", "g"))
    plain = body("plain", "g -> g")
    caller = body("caller", "g -> c", call("c", "reduce", "g"))
    chooser = body("chooser", "p g -> i", branch("i", "plain", "caller", "p g"))
    other = body("other", "g -> c", call("c", "plain", "g"), call("d", "unknown", "g"))
    assert leads_to_collective(module(reduce, plain, caller, chooser, other)) == {
        "reduce": True, "plain": False, "caller": True, "chooser": True, "other": False,
    }  # fmt: skip
