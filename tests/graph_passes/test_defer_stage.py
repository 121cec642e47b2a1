"""The stage variable of a deferred step: after a call that failed it says whether something is pending."""

from __future__ import annotations

import pytest

from graph_passes import defer
from graph_passes.defer import APPLIED, APPLYING, FLUSH, KEPT, MIDDLE, START, Defer
from graph_passes.graph import Body, GraphView, reached
from graph_passes.pass_base import Batch, BodyPlan
from tests.graph_passes.graphs import allreduce, apply, body, identity, module, node


def made(phase: str) -> GraphView:
    step = body(
        "step", "v w x -> ^u ^other",
        node("other", "AssignSubVariableOp", "w x", dtype="DT_FLOAT"),
        identity("g", "x"), allreduce("r", "g"), node("u", "AssignSubVariableOp", "v r", dtype="DT_FLOAT"),
    )  # fmt: skip
    step.graph.node[0].attr["dtype"].type = 20  # v is a variable
    plan = {"step": BodyPlan([Batch("batch", ("r",))], deferred=1, phase=phase)}
    if phase == FLUSH:
        whole = module(step)
        Defer().run(whole, plan)
        return GraphView(whole.root)
    apply(Defer(), step, plan=plan)
    return GraphView(step)


def marks(view: GraphView) -> dict[int, str]:
    """What is written to the stage variable -> the node that writes it."""
    variable = next(n.name for n in view.body.graph.node if n.attr["shared_name"].s == b"caramel_pending/batch/stage")
    writers = [n for n in view.body.graph.node if n.op == "AssignVariableOp" and n.input[0] == variable]
    return {view.nodes[n.input[1]].attr["value"].tensor.int64_val[0]: n.name for n in writers}


def waits_for(view: GraphView, name: str) -> set[str]:
    return reached(view.producers, [name])


def ends(made_: Body) -> list[str]:
    return list(made_.control_ret.values())


def test_a_start_says_that_all_is_kept_and_nothing_before():
    view = made(START)
    assert set(marks(view)) == {KEPT}
    assert "caramel_pending/batch/0/keep" in waits_for(view, marks(view)[KEPT])


@pytest.mark.parametrize("phase", [MIDDLE, FLUSH])
def test_nothing_is_sent_before_the_stage_says_so_and_it_changes_back_when_all_is_applied(phase):
    view = made(phase)
    stages = marks(view)
    assert stages[APPLYING] in waits_for(view, "r")
    assert "u" in waits_for(view, stages[APPLIED])
    assert stages[APPLIED] in waits_for(view, ends(view.body)[0])


def test_a_middle_says_kept_last_and_does_not_begin_without_data():
    view = made(MIDDLE)
    stages = marks(view)
    assert "x" in waits_for(view, stages[APPLYING])
    assert {stages[APPLIED], "caramel_pending/batch/0/keep", "other"} <= waits_for(view, stages[KEPT])
    assert stages[KEPT] in waits_for(view, ends(view.body)[0])


def test_a_flush_returns_something_for_the_rewriter_of_tensorflow_to_treat_it_like_the_whole_step():
    assert list(made(FLUSH).body.ret) == [defer.STAGE]


def test_the_variables_belong_to_the_batch_and_are_alike_in_all_phases():
    name = defer.stage_name(BodyPlan([Batch("batch", ("r",))]))
    assert all(name in made(phase).nodes for phase in (START, MIDDLE, FLUSH))
