"""inline: given a body that calls for its collectives, the body that holds them itself."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.graph import Body, GraphView
from graph_passes.inline import Inline
from tests.graph_passes.graphs import allreduce, apply, body, branch, call, constant, expect, identity, node, show

YES, NO = {"bool_val": [True]}, {"bool_val": [False]}


def reduce_body(*extra: Any, signature: str = "g -> r", **options: Any) -> Body:
    return body("reduce", signature, allreduce("r", "g"), *extra, **options)


def left_alone(*bodies: Body) -> bool:
    before = [show(b) for b in bodies]
    result = apply(Inline(), *bodies)
    changed = result.changed or any(b.changed for b in bodies)
    return not changed and result.statistics == {"calls inlined": 0} and [show(b) for b in bodies] == before


@pytest.mark.parametrize("op", ["PartitionedCall", "StatefulPartitionedCall"])
def test_a_collective_comes_up_out_of_a_call(op: str):
    step = body("step", "x -> y", identity("g", "x"), node("c", op, "g", f="reduce"), identity("y", "c"))
    result = apply(Inline(), reduce_body(), step)
    expect(step, "x -> y", identity("g", "x"), allreduce("c/r", "g"), identity("y", "c/r"))
    assert (result.changed, step.changed, result.statistics) == (True, True, {"calls inlined": 1})


def test_the_callee_itself_stays_as_it_was():
    callee = reduce_body()
    apply(Inline(), callee, body("step", "x -> c", call("c", "reduce", "x")))
    expect(callee, "g -> r", allreduce("r", "g"))
    assert not callee.changed


def two_levels(predicate: list[Any], name: str = "p") -> list[Body]:
    other = body("other", "g -> z", identity("z", "g"))
    middle = body("middle", "g -> i", *predicate, branch("i", "reduce", "other", f"{name} g"))
    return [reduce_body(), other, middle, body("step", "x -> y", call("c", "middle", "x"), identity("y", "c"))]


@pytest.mark.parametrize("value", [YES, {"tensor_content": b"\x01"}])
def test_a_collective_comes_up_out_of_a_constant_branch_in_a_call(value: Any):
    *rest, step = two_levels([constant("p", **value)])
    apply(Inline(), *rest, step)
    expect(step, "x -> y", constant("c/p", **value), allreduce("c/i/r", "x"), identity("y", "c/i/r"))


def test_a_constant_behind_identities_is_constant():
    *rest, step = two_levels([constant("k", **YES), identity("j", "k"), identity("p", "j")])
    apply(Inline(), *rest, step)
    names = {n.name: n.op for n in step.graph.node}
    assert (names["c/i/r"], "c/i" in names) == ("HorovodAllreduce", False)


@pytest.mark.parametrize("value", [NO, {"tensor_content": b"\x00"}, {}])
def test_a_false_predicate_takes_the_else_branch(value: Any):
    other = body("other", "g -> z", identity("z", "g"))
    step = body("step", "x -> i", constant("p", **value), branch("i", "other", "reduce", "p x"))
    apply(Inline(), other, reduce_body(), step)
    expect(step, "x -> i/r", constant("p", **value), allreduce("i/r", "x"))


def test_a_false_predicate_leaves_a_collective_that_never_runs_where_it_is():
    other = body("other", "g -> z", identity("z", "g"))
    assert left_alone(other, reduce_body(), body("step", "x -> i", constant("p", **NO),
                                                 branch("i", "reduce", "other", "p x")))  # fmt: skip


def test_a_branch_that_is_not_constant_is_left_alone():
    other = body("other", "g -> z", identity("z", "g"))
    assert left_alone(other, reduce_body(), body("step", "p x -> i", branch("i", "reduce", "other", "p x")))


def test_control_inputs_of_a_call_gate_its_arguments_and_nodes_without_inputs():
    callee = reduce_body(node("k", "Const"), node("s", "Mul", "r k"), signature="g -> s")
    step = body("step", "x -> c", node("w", "NoOp"), call("c", "reduce", "x ^w"))
    apply(Inline(), callee, step)
    expect(step, "x -> c/s", node("w", "NoOp"), node("c/input_control", "NoOp", "^w"),
           identity("c/g_in", "x ^c/input_control"), node("c/k", "Const", "^c/input_control"),
           allreduce("c/r", "c/g_in"), node("c/s", "Mul", "c/r c/k"))  # fmt: skip


def test_a_gated_argument_keeps_its_type():
    callee = reduce_body()
    callee.graph.node[0].attr["dtype"].type = 2  # double
    step = body("step", "x -> c", node("w", "NoOp"), call("c", "reduce", "x ^w"))
    apply(Inline(), callee, step)
    assert next(n.attr["T"].type for n in step.graph.node if n.name == "c/g_in") == 2


def test_who_waits_for_a_call_waits_for_all_of_the_callee_s_control_outputs():
    callee = reduce_body(node("u", "Assign", "r"), node("v", "Assign", "r"), signature="g -> r ^u ^v")
    step = body("step", "x -> y ^c", call("c", "reduce", "x"), identity("y", "x ^c"))
    apply(Inline(), callee, step)
    expect(step, "x -> y ^c=c/output_control", allreduce("c/r", "x"), node("c/u", "Assign", "c/r"),
           node("c/v", "Assign", "c/r"), node("c/output_control", "NoOp", "^c/r ^c/u ^c/v"),
           identity("y", "x ^c/output_control"))  # fmt: skip


def test_who_waits_for_a_call_waits_for_what_the_call_waited_for():
    step = body("step", "x -> y", node("w", "NoOp"), call("c", "reduce", "x ^w"), identity("y", "x ^c"))
    apply(Inline(), reduce_body(), step)
    end = next(n for n in step.graph.node if n.name == "c/output_control")
    assert sorted(end.input) == ["^c/input_control", "^c/r"]


def test_a_control_edge_from_an_argument_becomes_one_from_its_producer():
    callee = body("reduce", "g h -> r", allreduce("r", "g ^h"))
    step = body("step", "x -> c", node("s", "Split", "x"), call("c", "reduce", "x s:1"))
    apply(Inline(), callee, step)
    expect(step, "x -> c/r", node("s", "Split", "x"), allreduce("c/r", "x ^s"))


def test_colocation_groups_get_the_prefix_or_the_argument_s_producer():
    callee = reduce_body(node("s", "Mul", "r r", _class=["loc:@r", "loc:@g"]), signature="g -> s")
    step = body("step", "x -> c", call("c", "reduce", "x"))
    apply(Inline(), callee, step)
    expect(step, "x -> c/s", allreduce("c/r", "x"), node("c/s", "Mul", "c/r c/r", _class=["loc:@c/r", "loc:@x"]))


def test_a_colocation_group_of_a_call_names_a_node_that_exists():
    step = body("step", "x -> y", call("c", "reduce", "x"), node("y", "Neg", "c", _class=["loc:@c"]))
    apply(Inline(), reduce_body(), step)
    places = {p.decode().removeprefix("loc:@") for n in step.graph.node for p in n.attr["_class"].list.s}
    assert places <= {n.name for n in step.graph.node}


def test_an_empty_device_becomes_the_call_s_and_another_stays():
    callee = reduce_body(node("s", "Neg", "r", "/gpu:1"), signature="g -> s")
    step = body("step", "x -> c", call("c", "reduce", "x", "/cpu:0"))
    apply(Inline(), callee, step)
    expect(step, "x -> c/s", allreduce("c/r", "x", device="/cpu:0"), node("c/s", "Neg", "c/r", "/gpu:1"))


def test_a_callee_without_a_collective_is_left_alone():
    layer = body("layer", "x -> y", identity("y", "x"))
    assert left_alone(layer, body("step", "x -> r", call("c", "layer", "x"), allreduce("r", "c")))


def train(signature: str) -> Body:
    """Computes a gradient, reduces it and applies it."""
    return body("train", signature, node("g", "MatMul", "x x"), identity("i", "g"), allreduce("r", "i"),
                node("u", "Assign", "r"), node("loss", "Sum", "x"))  # fmt: skip


def test_a_callee_that_computes_its_gradients_and_applies_them_is_left_alone():
    assert left_alone(train("x -> loss ^u"), body("step", "x -> c ^c", call("c", "train", "x")))


def test_a_callee_that_returns_what_it_reduced_comes_up():
    step = body("step", "x -> c:1", call("c", "train", "x"))
    apply(Inline(), train("x -> loss r"), step)
    assert step.ret == {"out0": "c/r"}


def test_a_callee_that_reduces_a_cast_argument_comes_up():
    callee = body("train", "g -> loss", node("h", "Cast", "g"), allreduce("r", "h"), node("loss", "Sum", "r"))
    step = body("step", "x -> c", call("c", "train", "x"))
    apply(Inline(), callee, step)
    expect(step, "x -> c/loss", node("c/h", "Cast", "x"), allreduce("c/r", "c/h"), node("c/loss", "Sum", "c/r"))


def test_a_callee_compiled_by_xla_is_left_alone():
    assert left_alone(reduce_body(xla=True), body("step", "x -> c", call("c", "reduce", "x")))


def test_a_call_that_xla_must_compile_is_left_alone():
    assert left_alone(reduce_body(), body("step", "x -> c", call("c", "reduce", "x", _XlaMustCompile=True)))


def test_a_caller_compiled_by_xla_is_left_alone():
    assert left_alone(reduce_body(), body("step", "x -> c", call("c", "reduce", "x"), xla=True))


def test_a_call_marked_as_not_compiled_by_xla_comes_up():
    step = body("step", "x -> c", call("c", "reduce", "x", _XlaMustCompile=False))
    apply(Inline(), reduce_body(), step)
    expect(step, "x -> c/r", allreduce("c/r", "x"))


def test_a_callee_called_twice_comes_up_under_two_names():
    step = body("step", "x -> d", call("c", "reduce", "x"), call("d", "reduce", "c"))
    result = apply(Inline(), reduce_body(), step)
    expect(step, "x -> d/r", allreduce("c/r", "x"), allreduce("d/r", "c/r"))
    assert result.statistics == {"calls inlined": 2}


def test_a_name_that_the_caller_uses_already_is_avoided():
    step = body("step", "x -> y", call("c", "reduce", "x"), identity("c/r", "x"), node("y", "Add", "c c/r"))
    apply(Inline(), reduce_body(), step)


def test_a_name_made_free_is_not_another_node_s_of_the_callee():
    callee = reduce_body(identity("r_", "r"), signature="g -> r_")
    step = body("step", "x -> y", call("c", "reduce", "x"), identity("c/r", "x"), node("y", "Add", "c c/r"))
    apply(Inline(), callee, step)


def test_a_branch_waits_for_what_its_constant_predicate_waited_for():
    step = body("step", "x -> i", node("w", "NoOp"), constant("p", "^w", **YES), branch("i", "reduce", "reduce", "p x"))
    apply(Inline(), reduce_body(), step)
    assert GraphView(step).reaches(lambda n: n.name == "i/r")["w"]


def test_a_second_run_changes_nothing():
    bodies = two_levels([constant("p", **YES)])
    apply(Inline(), *bodies)
    for one in bodies:
        one.changed = False
    assert left_alone(*bodies)


def test_an_argument_returned_straight_through_becomes_the_caller_s_tensor():
    callee = body("reduce", "g h -> h r", allreduce("r", "g"))
    step = body("step", "x y -> z c", call("c", "reduce", "x y"), node("z", "Add", "c c:1"))
    apply(Inline(), callee, step)
    expect(step, "x y -> z y", allreduce("c/r", "x"), node("z", "Add", "y c/r"))


def test_several_outputs_keep_their_numbers():
    callee = body("reduce", "g h -> r:1 r", allreduce("r", "g h"))
    step = body("step", "x y -> c:1 z", call("c", "reduce", "x y"), identity("z", "c"))
    apply(Inline(), callee, step)
    expect(step, "x y -> c/r z", allreduce("c/r", "x y"), identity("z", "c/r:1"))
