"""The view over a body: what verify refuses, in which order nodes come, what moves when nodes are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.graph import GraphError, GraphView, join, split, verify
from tests.graph_passes.graphs import body, call, expect, identity, module, node


def refused(broken: Any, outputs: Any = None) -> str:
    with pytest.raises(GraphError) as error:
        verify(broken, outputs)
    return str(error.value)


def test_a_well_formed_body_passes():
    verify(body("step", "x -> b ^w", node("w", "NoOp"), identity("a", "x ^w"), node("b", "Add", "a x:0")))


def test_two_nodes_of_one_name_are_refused():
    assert refused(body("step", "x -> a", identity("a", "x"), identity("a", "x"))) == "step: two nodes are called a"


@pytest.mark.parametrize("text", ["gone", "gone:1", "^gone"])
def test_an_input_that_does_not_exist_is_refused(text: str):
    broken = body("step", "x -> a", node("a", "Add", f"x {text}"))
    assert refused(broken) == f"step: a reads {text}, which does not exist"


def test_a_data_input_after_a_control_input_is_refused():
    broken = body("step", "x y -> a", node("a", "Add", "x ^y y"))
    assert refused(broken) == "step: a has a data input after a control input"


def test_a_cycle_is_refused_and_its_nodes_named():
    broken = body("step", "x -> a", node("a", "Add", "x b"), identity("b", "a"), identity("free", "x"))
    assert refused(broken) == "step: cycle through a, b"


def test_a_cycle_of_control_edges_is_refused():
    assert refused(body("step", "x -> a", identity("a", "x ^b"), identity("b", "a"))) == "step: cycle through a, b"


def test_a_node_that_waits_for_itself_is_refused():
    assert refused(body("step", "x -> a", identity("a", "x ^a"))) == "step: cycle through a"


@pytest.mark.parametrize("op", ["NextIteration", "RefNextIteration"])
def test_the_back_edge_of_a_loop_is_no_cycle(op: str):
    loop = [node("merge", "Merge", "x next"), node("add", "Add", "merge merge"), node("next", op, "add")]
    verify(body("step", "x -> add", *loop))


def test_a_missing_argument_is_refused():
    broken = body("step", "x -> a", identity("a", "x"))
    broken.args.append("y")
    assert refused(broken) == "step: argument y is gone"


def test_a_missing_output_is_refused():
    assert refused(body("step", "x -> x gone")) == "step: output out1 reads gone, which does not exist"


def test_a_missing_control_output_is_refused():
    assert refused(body("step", "x -> x ^w=gone")) == "step: control output w names gone, which does not exist"


def test_an_output_number_out_of_range_is_refused():
    broken = body("step", "x -> a", node("s", "Split", "x"), identity("a", "s:2"))
    assert refused(broken, lambda n: 2) == "step: a reads s:2, but s has 2 outputs"


def test_a_returned_output_number_out_of_range_is_refused():
    assert refused(body("step", "x -> x:1"), lambda n: 1) == "step: output out0 reads x:1, but x has 1 outputs"


def test_data_read_from_a_node_without_outputs_is_refused():
    broken = body("step", "x -> a", node("w", "NoOp"), identity("a", "w"))
    assert refused(broken, lambda n: 0 if n.op == "NoOp" else 1) == "step: a reads w, but w has 0 outputs"


@pytest.mark.parametrize("outputs", [None, lambda n: None, lambda n: 3])
def test_output_numbers_in_range_or_of_unknown_ops_pass(outputs: Any):
    verify(body("step", "x -> a", node("s", "Split", "x"), identity("a", "s:2")), outputs)


def test_the_order_is_the_trace_s_when_that_is_topological():
    view = GraphView(body("step", "x -> c", node("b", "Const"), node("a", "Const"), node("c", "Add", "a b")))
    assert list(view.order) == ["x", "b", "a", "c"]


def test_only_a_node_listed_before_its_input_changes_place():
    late = [identity("c", "b"), node("a", "Const"), identity("b", "a"), node("d", "Const")]
    assert list(GraphView(body("step", "-> c", *late)).order) == ["a", "b", "c", "d"]


def test_the_order_does_not_depend_on_the_order_of_inputs():
    nodes = [node("c", "Const"), node("b", "Const"), node("a", "Const")]
    orders = [
        list(GraphView(body("step", "-> s", *nodes, node("s", "AddN", inputs), identity("z", "a"))).order)
        for inputs in ("a b c", "c a b ^a")
    ]
    assert orders == [["c", "b", "a", "s", "z"]] * 2


def test_the_order_numbers_nodes_from_zero():
    assert GraphView(body("step", "x -> a", identity("a", "x"))).order == {"x": 0, "a": 1}


def test_reaches_looks_strictly_after_a_node():
    nodes = [identity("a", "x"), node("r", "Found", "a"), identity("c", "r"), node("d", "NoOp", "^a")]
    below = GraphView(body("step", "x -> c", *nodes)).reaches(lambda n: n.op == "Found")
    assert below == {"x": True, "a": True, "r": False, "c": False, "d": False}


def test_reaches_follows_control_edges():
    nodes = [node("w", "NoOp"), node("v", "NoOp", "^w"), node("r", "Found", "x ^v")]
    assert GraphView(body("step", "x -> r", *nodes)).reaches(lambda n: n.op == "Found")["w"]


def test_consumers_are_listed_once_each():
    view = GraphView(body("step", "x -> b", node("a", "Add", "x x ^x"), identity("b", "x")))
    assert view.consumers["x"] == ["a", "b"]


def test_replace_moves_data_readers_to_the_new_tensors():
    step = body("step", "x -> a c", node("old", "Split", "x"), node("new", "Split", "x"), node("a", "Add", "old old:1"),
                identity("c", "x"))  # fmt: skip
    GraphView(step).replace({("old", 0): "new:1", ("old", 1): "new"}, {"old": "new"})
    expect(step, "x -> a c", node("new", "Split", "x"), node("a", "Add", "new:1 new"), identity("c", "x"))


def test_replace_moves_control_readers_and_merges_them():
    step = body("step", "x -> a", node("p", "NoOp"), node("q", "NoOp"), node("r", "NoOp"), identity("a", "x ^p ^q"))
    GraphView(step).replace({}, {"p": "r", "q": "r"})
    expect(step, "x -> a", node("r", "NoOp"), identity("a", "x ^r"))


def test_replace_moves_outputs():
    step = body("step", "x -> old:1 x", node("old", "Split", "x"), node("new", "Split", "x"))
    GraphView(step).replace({("old", 1): "new"}, {"old": "new"})
    expect(step, "x -> new x", node("new", "Split", "x"))


def test_replace_moves_control_outputs_and_keeps_their_keys():
    step = body("step", "x -> x ^old", node("old", "NoOp"), node("new", "NoOp"))
    GraphView(step).replace({}, {"old": "new"})
    expect(step, "x -> x ^old=new", node("new", "NoOp"))


def test_replace_moves_colocation_groups():
    nodes = [identity("old", "x"), identity("new", "x"), node("a", "Add", "x x", _class=["loc:@old", "loc:@x"])]
    step = body("step", "x -> a", *nodes)
    GraphView(step).replace({("old", 0): "new"}, {"old": "new"})
    expect(step, "x -> a", identity("new", "x"), node("a", "Add", "x x", _class=["loc:@new", "loc:@x"]))


def test_replace_without_gone_keeps_the_old_node():
    step = body("step", "x -> b", identity("a", "x"), identity("b", "a ^a"))
    GraphView(step).replace({("a", 0): "x"}, {})
    expect(step, "x -> b", identity("a", "x"), identity("b", "x ^a"))


def test_the_indexes_follow_a_replacement():
    view = GraphView(body("step", "x -> b", identity("a", "x"), identity("b", "a")))
    assert list(view.order) == ["x", "a", "b"]
    view.replace({("a", 0): "x"}, {"a": "x"})
    assert (list(view.order), view.consumers, list(view.nodes)) == (["x", "b"], {"x": ["b"], "b": []}, ["x", "b"])


def test_add_puts_control_inputs_last_and_once():
    step = body("step", "x w v -> x")
    added = GraphView(step).add("a", "Add", ["^w", "x", "^v", "x:1", "^w"], "/cpu:0")
    assert (list(added.input), added.device) == (["x", "x:1", "^v", "^w"], "/cpu:0")


def test_add_refuses_a_name_in_use():
    with pytest.raises(GraphError, match="step: x exists already"):
        GraphView(body("step", "x -> x")).add("x", "NoOp", [])


def test_add_control_input_adds_an_edge_only_where_there_is_none():
    step = body("step", "x y -> a", identity("a", "x"))
    view = GraphView(step)
    assert [view.add_control_input("a", source) for source in ("x", "y", "y")] == [False, True, False]
    expect(step, "x y -> a", identity("a", "x ^y"))


def test_split_and_join_are_each_other_s_inverse():
    parts = {"a": ("a", 0), "a:2": ("a", 2), "^a": ("a", -1), "s/a_1:10": ("s/a_1", 10)}
    assert {text: split(text) for text in parts} == parts
    assert [join(*part) for part in parts.values()] == list(parts)


def test_a_body_that_nothing_refers_to_is_not_reachable():
    leaf, unused = body("leaf", "x -> x"), body("unused", "x -> x")
    both = module(leaf, unused, body("root", "x -> c", call("c", "leaf", "x")))
    assert [b.name for b in both.reachable()] == ["leaf", "root"]
