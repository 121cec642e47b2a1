"""dataflow: what waits for what in a body, which ops may be gated, and which reads belong to which gradient."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.dataflow import dataflow, restarts
from tests.graph_passes.graphs import allreduce, body, identity, node


def step(update_v: str, *extra: Any) -> Any:
    """Two layers; w's gradient is rw, v's is rv. update_v: what v's update takes."""
    return body(
        "step", "x w v -> loss",
        node("read_w", "ReadVariableOp", "w"), node("y", "Mul", "x read_w"),
        node("read_v", "ReadVariableOp", "v"), node("loss", "Mul", "y read_v"),
        node("grad", "ReluGrad", "loss"), allreduce("rv", "grad"), allreduce("rw", "y"),
        node("update_w", "AssignSubVariableOp", "w rw"), node("update_v", "ResourceApplyGradientDescent", update_v),
        *extra,
    )  # fmt: skip


def test_an_op_waits_for_its_data_and_control_inputs():
    small = body("step", "x -> b", identity("a", "x"), identity("b", "x ^a"))
    assert dataflow(small).inputs == {"x": [], "a": ["x"], "b": ["x", "a"]}


def test_gates_are_backward_ops_that_are_never_fused():
    assert dataflow(step("v rv")).gates == {"grad"}


@pytest.mark.parametrize(("reader", "gate"), [("BiasAdd", False), ("Reshape", True)])
def test_a_product_is_a_gate_unless_it_is_fused_into_its_reader(reader: str, gate: bool):
    small = body("step", "x y -> b", node("m", "MatMul", "x y"), node("b", reader, "m"))
    assert ("m" in dataflow(small).gates) == gate


def test_a_gradient_s_readers_are_those_of_the_variable_its_update_writes():
    assert dataflow(step("v rv")).readers == {"rv": ["loss"], "rw": ["y"]}


def test_a_handle_is_found_behind_identities():
    passed_on = step("h rv", identity("h", "v"))
    assert dataflow(passed_on).readers["rv"] == ["loss"]


def test_where_an_update_takes_all_gradients_nobody_knows_whose_it_is():
    assert dataflow(step("v rv ^rw")).readers == {"rv": [], "rw": ["y"]}


def test_a_slot_that_only_the_update_reads_is_no_parameter():
    slot = [node("read_m", "ReadVariableOp", "x ^rv"), node("update_m", "AssignVariableOp", "x read_m")]
    assert dataflow(step("v rv", *slot)).readers["rv"] == ["loss"]


@pytest.mark.parametrize(("seeds", "found"), [({"seed": 1}, ["r"]), ({"seed2": 2}, ["r"]), ({"seed": 0}, []), ({}, [])])
def test_only_seeded_random_ops_begin_again(seeds: dict[str, int], found: list[str]):
    assert restarts(body("step", "x -> r", node("r", "RandomUniform", "x", **seeds))) == found
