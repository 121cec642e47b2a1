"""order: given a body and its batches, the same body with the control edges that fix their order."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes.order import Order
from graph_passes.pass_base import Batch, BodyPlan
from tests.graph_passes.graphs import allreduce, apply, body, expect, identity, show

BATCHES = [Batch(f"m{k}", (f"r{k}",)) for k in range(4)]


def plan(window: int = 1, count: int = 4) -> dict[str, BodyPlan]:
    return {"step": BodyPlan(BATCHES[:count], window)}


def step(m1: str = "", m2: str = "", m3: str = "") -> Any:
    """Four batches; m1 reduces an argument, the others gradients. The texts are what each one waits for."""
    gradients = [identity(f"g{k}", "x") for k in (0, 2, 3)]
    batches = [allreduce(f"m{k}", inputs) for k, inputs in enumerate(["g0", f"x {m1}", f"g2 {m2}", f"g3 {m3}"])]
    return body("step", "x -> m0 m1 m2 m3", *gradients, *batches)


def same(a: Any, b: Any) -> None:
    expect(a, "x -> m0 m1 m2 m3", *(n for n in b.graph.node if n.op != "Placeholder"))


def test_with_window_1_each_batch_waits_for_the_one_before():
    ordered = step()
    result = apply(Order(), ordered, plan=plan())
    same(ordered, step("^m0", "^m1", "^m2"))
    assert (result.changed, ordered.changed, result.statistics) == (True, True, {"control edges": 3})


def test_with_window_2_each_waits_for_the_second_before_and_for_the_gradients_of_the_one_before():
    ordered = step()
    result = apply(Order(), ordered, plan=plan(2))
    same(ordered, step("^g0", "^m0", "^m1 ^g2"))  # m2 does not wait for m1's x: an argument is there from the start
    assert result.statistics == {"control edges": 4}


def test_with_window_3_each_waits_for_the_third_before():
    ordered = step()
    apply(Order(), ordered, plan=plan(3))
    same(ordered, step("^g0", "", "^m0 ^g2"))


def test_a_grouped_batch_is_waited_for_with_all_its_gradients():
    nodes = [identity("g", "x"), identity("h", "x"), allreduce("m0", "g h"), allreduce("m1", "x")]
    ordered = body("step", "x -> m0 m1", *nodes)
    apply(Order(), ordered, plan=plan(2, count=2))
    expect(ordered, "x -> m0 m1", *nodes[:3], allreduce("m1", "x ^g ^h"))


def test_without_regroup_the_members_themselves_are_ordered():
    ordered = body("step", "x y -> r0 r1", allreduce("r0", "x"), allreduce("r1", "y"))
    apply(Order(), ordered, plan=plan(count=2))
    expect(ordered, "x y -> r0 r1", allreduce("r0", "x"), allreduce("r1", "y ^r0"))


def test_an_edge_that_is_there_is_not_added_again():
    ordered = step("^m0", "", "^m2")
    result = apply(Order(), ordered, plan=plan())
    same(ordered, step("^m0", "^m1", "^m2"))
    assert result.statistics == {"control edges": 1}


def test_a_batch_that_reads_the_one_before_needs_no_edge():
    ordered = body("step", "x -> m1", allreduce("m0", "x"), allreduce("m1", "m0"))
    result = apply(Order(), ordered, plan=plan(count=2))
    expect(ordered, "x -> m1", allreduce("m0", "x"), allreduce("m1", "m0"))
    assert not result.changed


@pytest.mark.parametrize("window", [1, 2])
def test_a_second_run_changes_nothing(window: int):
    ordered = step()
    apply(Order(), ordered, plan=plan(window))
    ordered.changed, before = False, show(ordered)
    result = apply(Order(), ordered, plan=plan(window))
    assert (show(ordered), ordered.changed, result.changed) == (before, False, False)


def test_each_body_has_an_order_of_its_own():
    one, two = (body(name, "x -> r0 r1", allreduce("r0", "x"), allreduce("r1", "x")) for name in ("one", "two"))
    apply(Order(), one, two, plan={"one": BodyPlan(BATCHES[:2]), "two": BodyPlan(BATCHES[1::-1])})
    expect(one, "x -> r0 r1", allreduce("r0", "x"), allreduce("r1", "x ^r0"))
    expect(two, "x -> r0 r1", allreduce("r0", "x ^r1"), allreduce("r1", "x"))


def test_one_batch_needs_no_order():
    alone = step()
    assert not apply(Order(), alone, plan=plan(2, count=1)).changed
    assert not alone.changed


def test_without_a_window_there_are_no_edges():
    ordered = step()
    assert not apply(Order(), ordered, plan=plan(0)).changed
    same(ordered, step())


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_1_is_refused(window: int):
    with pytest.raises(ValueError, match=rf"order\(window={window}\): a window is at least 1"):
        Order(window)
