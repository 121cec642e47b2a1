"""untie: given updates that wait for all gradients through an IdentityN, the body in which each waits for its own."""

from __future__ import annotations

import pytest

from graph_passes.untie import Untie
from tests.graph_passes.graphs import allreduce, apply, body, expect, identity, node, show


def test_readers_are_pointed_at_what_is_passed_on_and_the_tie_goes():
    reduced = [allreduce("r", "x"), allreduce("s", "y")]
    step = body("step", "x y -> b", *reduced, node("t", "IdentityN", "r s"), identity("a", "t"), identity("b", "t:1"))
    result = apply(Untie(), step)
    expect(step, "x y -> b", *reduced, identity("a", "r"), identity("b", "s"))
    assert (result.changed, step.changed, result.statistics) == (True, True, {"ties": 1})


def test_what_is_returned_is_pointed_there_too():
    step = body("step", "x -> t:1 t", allreduce("r", "x"), node("t", "IdentityN", "x r"))
    apply(Untie(), step)
    expect(step, "x -> r x", allreduce("r", "x"))


def test_who_waits_for_the_tie_itself_still_waits_for_all():
    step = body("step", "x y -> a b", allreduce("r", "x"), allreduce("s", "y"), node("t", "IdentityN", "r s"),
                identity("a", "t"), identity("b", "x ^t"))  # fmt: skip
    apply(Untie(), step)
    expect(step, "x y -> a b", allreduce("r", "x"), allreduce("s", "y"), node("t", "IdentityN", "r s"),
           identity("a", "r"), identity("b", "x ^t"))  # fmt: skip


@pytest.mark.parametrize(
    "nodes",
    [
        [identity("r", "x"), node("t", "IdentityN", "r"), identity("a", "t")],
        [allreduce("r", "a"), node("t", "IdentityN", "x"), identity("a", "t")],
        [allreduce("r", "x"), node("t", "IdentityN", "r ^x"), identity("a", "t")],
    ],
    ids=["no collective", "before the collective", "with a control input"],
)
def test_other_ties_stay(nodes):
    step = body("step", "x -> a", *nodes)
    before = show(step)
    assert not apply(Untie(), step).changed
    assert (show(step), step.changed) == (before, False)


def test_a_second_run_changes_nothing():
    step = body("step", "x -> a ^t", allreduce("r", "x"), node("t", "IdentityN", "r"), identity("a", "t"))
    apply(Untie(), step)
    step.changed, before = False, show(step)
    assert not apply(Untie(), step).changed
    assert (show(step), step.changed) == (before, False)
