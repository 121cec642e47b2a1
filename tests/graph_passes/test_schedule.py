"""schedule: given a body and edges between its ops, the body in which the one waits for the other."""

from __future__ import annotations

import pytest

from graph_passes import manager
from graph_passes.graph import GraphError
from graph_passes.pass_base import BodyPlan
from graph_passes.schedule import Schedule
from tests.graph_passes.graphs import apply, body, expect, identity, module


def plan(*edges: tuple[str, str]) -> dict[str, BodyPlan]:
    return {"step": BodyPlan([], edges=edges)}


def test_the_target_waits_for_the_source():
    step = body("step", "x -> a b", identity("a", "x"), identity("b", "x"))
    result = apply(Schedule(), step, plan=plan(("a", "b")))
    expect(step, "x -> a b", identity("a", "x"), identity("b", "x ^a"))
    assert (result.changed, step.changed, result.statistics) == (True, True, {"control edges": 1})


def test_an_edge_that_is_there_changes_nothing():
    step = body("step", "x -> b", identity("a", "x"), identity("b", "a"))
    assert not apply(Schedule(), step, plan=plan(("a", "b"))).changed
    assert not step.changed


def test_a_circle_is_refused_by_the_manager():
    step = body("step", "x -> b", identity("a", "x"), identity("b", "a"))
    with pytest.raises(manager.PassError, match="pass schedule failed: step: cycle through a, b"):
        manager.run([Schedule()], module(step), lambda _: plan(("b", "a")))


@pytest.mark.parametrize("edge", [("gone", "a"), ("a", "gone")])
def test_an_op_that_does_not_exist_is_named(edge: tuple[str, str]):
    with pytest.raises(GraphError, match="there is no gone"):
        apply(Schedule(), body("step", "x -> a", identity("a", "x")), plan=plan(edge))
