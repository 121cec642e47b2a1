"""regroup: given a body and its batches, the body in which each batch is one message."""

from __future__ import annotations

from typing import Any

import pytest

from graph_passes import manager
from graph_passes.graph import Body, GraphError
from graph_passes.pass_base import Batch, BodyPlan
from graph_passes.regroup import Regroup
from tests.graph_passes.graphs import allreduce, apply, batch, body, expect, identity, module, node, show


def plan(*batches: str) -> dict[str, BodyPlan]:
    """Batches of the body "step", each written "name: member member"."""
    split = [text.split(":") for text in batches]
    return {"step": BodyPlan([Batch(name, tuple(members.split())) for name, members in split])}


def three() -> Body:
    return body("step", "x y z -> ra b rc", node("w", "NoOp"), node("v", "NoOp"), allreduce("ra", "x ^w", "3,4"),
                allreduce("rb", "y ^v ^w", "5"), allreduce("rc", "z", ""), node("b", "Add", "rb rc ^ra"))  # fmt: skip


def test_three_all_reduces_become_one_grouped_all_reduce():
    step = three()
    result = apply(Regroup(), step, plan=plan("m: ra rb rc"))
    expect(step, "x y z -> m b m:2", node("w", "NoOp"), node("v", "NoOp"),
           batch("m", "ra rb rc", "x y z ^v ^w", "3,4;5;", num_tensors=3), node("b", "Add", "m:1 m:2 ^m"))  # fmt: skip
    assert (result.changed, step.changed, result.statistics) == (True, True, {"collectives merged": 3, "batches": 1})


def test_members_get_their_output_numbers_in_the_batch_s_order():
    step = three()
    apply(Regroup(), step, plan=plan("m: rc ra rb"))
    expect(step, "x y z -> m:1 b m", node("w", "NoOp"), node("v", "NoOp"),
           batch("m", "rc ra rb", "z x y ^v ^w", ";3,4;5"), node("b", "Add", "m:2 m ^m"))  # fmt: skip


def test_unknown_shapes_keep_their_place_in_a_batch():
    step = body("step", "x y -> ra rb", allreduce("ra", "x"), allreduce("rb", "y", "5"))
    del step.graph.node[2].attr["_caramel_shapes"]
    apply(Regroup(), step, plan=plan("m: ra rb"))
    expect(step, "x y -> m m:1", batch("m", "ra rb", "x y", "?;5"))


def test_a_collective_of_no_batch_stays():
    step = body("step", "x y -> ra rb", allreduce("ra", "x"), allreduce("rb", "y"))
    apply(Regroup(), step, plan=plan("m: rb"))
    expect(step, "x y -> ra m", allreduce("ra", "x"), batch("m", "rb", "y"))


def test_a_body_without_batches_stays():
    step, other = three(), body("other", "x -> r", allreduce("r", "x"))
    apply(Regroup(), step, other, plan=plan("m: ra rb"))
    expect(other, "x -> r", allreduce("r", "x"))
    assert not other.changed


def test_a_batch_of_one_is_renamed_and_keeps_its_op():
    step = body("step", "x -> b ^ra", allreduce("ra", "x", "3"), node("b", "Neg", "ra", _class=["loc:@ra"]))
    result = apply(Regroup(), step, plan=plan("m: ra"))
    expect(step, "x -> b ^ra=m", batch("m", "ra", "x", "3"), node("b", "Neg", "m", _class=["loc:@m"]))
    assert result.statistics == {"collectives merged": 0, "batches": 1}


def test_a_batch_keeps_its_members_device():
    step = body("step", "x y -> ra rb", allreduce("ra", "x", device="/gpu:0"), allreduce("rb", "y", device="/gpu:0"))
    apply(Regroup(), step, plan=plan("m: ra rb"))
    expect(step, "x y -> m m:1", batch("m", "ra rb", "x y", "?;?", device="/gpu:0"))


@pytest.mark.parametrize(
    "other",
    [
        allreduce("rb", "y", T="DT_DOUBLE"),
        allreduce("rb", "y", reduce_op=2),
        allreduce("rb", "y", process_set_id=1),
        allreduce("rb", "y", prescale_factor=0.5),
        allreduce("rb", "y", postscale_factor=0.5),
        allreduce("rb", "y", device="/gpu:0"),
        node("rb", "HorovodAllgather", "y", T="DT_FLOAT"),
        allreduce("rb", "y z"),
    ],
    ids=["dtype", "reduce_op", "process set", "prescale", "postscale", "device", "op", "grouped"],
)
def test_a_batch_of_unlike_collectives_is_refused_and_both_named(other: Any):
    step = body("step", "x y z -> ra rb", allreduce("ra", "x"), other)
    with pytest.raises(GraphError, match="step: m cannot hold both ra and rb"):
        apply(Regroup(), step, plan=plan("m: ra rb"))


def test_two_grouped_all_reduces_are_not_merged():
    step = body("step", "x y -> ra rb", allreduce("ra", "x y"), allreduce("rb", "y x"))
    with pytest.raises(GraphError, match="step: m cannot hold both ra and ra"):
        apply(Regroup(), step, plan=plan("m: ra rb"))


def test_a_member_that_does_not_exist_is_refused():
    with pytest.raises(GraphError, match="step: m names gone, which does not exist"):
        apply(Regroup(), three(), plan=plan("m: ra gone"))


@pytest.mark.parametrize("between", ["ra", "f"], ids=["directly", "through a node"])
def test_a_batch_whose_member_depends_on_another_is_refused_by_the_manager(between: str):
    step = body("step", "x -> rb", allreduce("ra", "x"), identity("f", "ra"), allreduce("rb", between))
    with pytest.raises(manager.PassError, match=r"^pass regroup failed: step: cycle through .*m"):
        manager.run([Regroup()], module(step), lambda _: plan("m: ra rb"))


def test_a_grouped_all_reduce_of_the_user_s_keeps_its_outputs():
    step = body("step", "x y -> ra:1 b", allreduce("ra", "x y", "3;4"), identity("b", "ra"))
    apply(Regroup(), step, plan=plan("m: ra"))
    expect(step, "x y -> m:1 b", batch("m", "ra", "x y", "3;4"), identity("b", "m"))


def test_an_all_gather_is_renamed():
    step = body("step", "x -> b", node("ra", "HorovodAllgather", "x", T="DT_FLOAT"), identity("b", "ra"))
    apply(Regroup(), step, plan=plan("m: ra"))
    renamed = node("m", "HorovodAllgather", "x", T="DT_FLOAT", ignore_name_scope=True, _caramel_batch=["ra"])
    expect(step, "x -> b", renamed, identity("b", "m"))


def test_a_second_run_with_the_same_plan_changes_nothing():
    step, both = three(), plan("m: ra rc", "n: rb")
    apply(Regroup(), step, plan=both)
    step.changed, before = False, show(step)
    result = apply(Regroup(), step, plan=both)
    assert (show(step), step.changed, result.changed) == (before, False, False)
    assert result.statistics == {"collectives merged": 0, "batches": 0}
