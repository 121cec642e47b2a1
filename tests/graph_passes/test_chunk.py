"""chunk: given a body and a gradient to be cut, the body in which its slices travel one by one."""

from __future__ import annotations

from typing import Any

import pytest
from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2

from graph_passes import ops
from graph_passes.chunk import Chunk, slice_name
from graph_passes.graph import GraphError
from graph_passes.pass_base import BodyPlan
from tests.graph_passes.graphs import allreduce, apply, body, expect, node, show


def ints(name: str, *values: int, scalar: bool = False) -> Any:
    shape = tensor_shape_pb2.TensorShapeProto()
    if not scalar:
        shape.dim.add().size = len(values)
    value = tensor_pb2.TensorProto(dtype=ops.DT_INT32, tensor_shape=shape, int_val=values)
    return node(name, "Const", dtype="DT_INT32", value=value)


def reshape(name: str, inputs: str) -> Any:
    return node(name, "Reshape", inputs, T="DT_FLOAT", Tshape="DT_INT32")


def cut_in(parts: int) -> dict[str, BodyPlan]:
    return {"step": BodyPlan([], chunks={"r": parts})}


def test_a_gradient_is_cut_into_slices_of_whole_rows_and_joined_again():
    step = body("step", "x -> r", node("w", "NoOp"), allreduce("r", "x ^w", "5,64"))
    result = apply(Chunk(), step, plan=cut_in(2))
    expect(
        step, "x -> r_whole", node("w", "NoOp"),
        ints("r_rows_shape", 5, 64), reshape("r_rows", "x r_rows_shape"), ints("r_sizes", 2, 3),
        ints("r_axis", 0, scalar=True),
        node("r_split", "SplitV", "r_rows r_sizes r_axis", T="DT_FLOAT", Tlen="DT_INT32", num_split=2),
        allreduce(slice_name("r", 0, 2), "r_split ^w", "2,64"),
        allreduce(slice_name("r", 1, 2), "r_split:1 ^w", "3,64"),
        node("r_join", "ConcatV2", "r_part0of2 r_part1of2 r_axis", T="DT_FLOAT", Tidx="DT_INT32", N=2),
        ints("r_whole_shape", 5, 64), reshape("r_whole", "r_join r_whole_shape"),
    )  # fmt: skip
    assert (result.changed, step.changed, result.statistics) == (True, True, {"gradients cut": 1, "slices": 2})


@pytest.mark.parametrize(("shape", "parts", "row"), [("7,3", 3, 1), ("48", 3, 16), ("64,2", 2, 64), ("64", 4, 16)])
def test_rows_are_as_long_as_the_gradient_and_the_number_of_slices_allow(shape: str, parts: int, row: int):
    step = body("step", "x -> r", allreduce("r", "x", shape))
    apply(Chunk(), step, plan=cut_in(parts))
    (rows,) = [n for n in step.graph.node if n.name == "r_rows_shape"]
    assert rows.attr["value"].tensor.int_val[1] == row


def test_who_waits_for_the_gradient_waits_for_the_whole_of_it():
    step = body("step", "x -> a ^r", allreduce("r", "x", "64"), node("a", "Neg", "x ^r", _class=["loc:@r"]))
    apply(Chunk(), step, plan=cut_in(2))
    (waiting,) = [n for n in step.graph.node if n.name == "a"]
    assert (list(waiting.input), waiting.attr["_class"].list.s[0]) == (["x", "^r_whole"], b"loc:@r_whole")
    assert step.control_ret == {"r": "r_whole"}


def test_a_second_run_changes_nothing():
    step = body("step", "x -> r", allreduce("r", "x", "64"))
    apply(Chunk(), step, plan=cut_in(2))
    step.changed, before = False, show(step)
    assert not apply(Chunk(), step, plan=cut_in(2)).changed
    assert (show(step), step.changed) == (before, False)


@pytest.mark.parametrize("shape", ["?", "3,?", "3;4"])
def test_what_has_no_single_known_shape_is_refused(shape: str):
    inputs = "x x" if ";" in shape else "x"
    with pytest.raises(GraphError, match="step: r is not an all-reduce of one tensor of known shape"):
        apply(Chunk(), body("step", "x -> r", allreduce("r", inputs, shape)), plan=cut_in(2))


@pytest.mark.parametrize("parts", [1, 5])
def test_a_number_of_slices_that_cannot_be_is_refused(parts: int):
    with pytest.raises(GraphError, match=f"r has 4 elements and cannot be cut into {parts} slices"):
        apply(Chunk(), body("step", "x -> r", allreduce("r", "x", "2,2")), plan=cut_in(parts))
