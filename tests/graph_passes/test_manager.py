"""manager: which texts are pipelines and what they mean; running one, verifying it, and what a failure says."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from graph_passes import manager
from graph_passes.chunk import Chunk
from graph_passes.defer import Defer
from graph_passes.graph import GraphError, Module
from graph_passes.inline import Inline
from graph_passes.order import Order
from graph_passes.pass_base import Batch, BodyPlan, PassResult
from graph_passes.regroup import Regroup
from graph_passes.schedule import Schedule
from graph_passes.untie import Untie
from tests.graph_passes.graphs import allreduce, batch, body, call, expect, identity, module, node


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("inline", [Inline()]),
        (" inline ,\torder ", [Inline(), Order(1)]),
        ("regroup", [Regroup(8 * 2**20)]),
        ("regroup()", [Regroup(8 * 2**20)]),
        ("regroup(cap=8MB)", [Regroup(8 * 2**20)]),
        ("regroup ( cap = 8 mb )", [Regroup(8 * 2**20)]),
        ("regroup(cap=1.5KB)", [Regroup(1536)]),
        ("regroup(cap=2GB)", [Regroup(2**31)]),
        ("regroup(cap=100)", [Regroup(100)]),
        ("regroup(cap=100B),order(window=2)", [Regroup(100), Order(2)]),
        (manager.DEFAULT, [Inline(), Untie(), Chunk(), Regroup(8 * 2**20), Order(1), Schedule(), Defer()]),
    ],
)
def test_a_text_gives_its_passes(text: str, passes: list[Any]):
    assert manager.parse(text) == passes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inlines", "no pass is called 'inlines'; there are inline, untie, chunk, regroup, order, schedule, defer"),
        ("inline,Order", "no pass is called 'Order'; there are inline, untie, chunk, regroup, order, schedule, defer"),
        ("regroup(size=8MB)", "regroup has no option 'size'; it has cap"),
        ("inline(cap=1)", "inline has no option 'cap'; it has none"),
        ("defer(known=1)", "defer has no option 'known'; it has none"),
        ("regroup(8MB)", "regroup has no option '8MB'; it has cap"),
        ("regroup(cap=big)", "regroup(cap=big): 'big' is not a number of bytes or a size like 8MB"),
        ("regroup(cap=8TB)", "regroup(cap=8TB): '8TB' is not a number of bytes or a size like 8MB"),
        ("regroup(cap=-1)", "regroup(cap=-1): '-1' is not a number of bytes or a size like 8MB"),
        ("regroup(cap=1,cap=2)", "regroup: cap is given twice"),
        ("order(window=8MB)", "order(window=8MB): '8MB' is not a number"),
        ("regroup(cap=)", "regroup(cap=): '' is not a number of bytes or a size like 8MB"),
        ("order(window=1.5)", "order(window=1.5): '1.5' is not a whole number"),
        ("order(window=0)", "order(window=0): a window is at least 1"),
        (
            "order,inline",
            "order,inline: passes come at most once, in the order inline,untie,chunk,regroup,order,schedule,defer",
        ),
        (
            "order,order",
            "order,order: passes come at most once, in the order inline,untie,chunk,regroup,order,schedule,defer",
        ),
        ("", f"empty: a pipeline looks like {manager.DEFAULT!r}"),
        ("  ", f"empty: a pipeline looks like {manager.DEFAULT!r}"),
        ("inline,", f"cannot read 'inline,': a pipeline looks like {manager.DEFAULT!r}"),
        ("inline,,order", f"cannot read ',order': a pipeline looks like {manager.DEFAULT!r}"),
        ("inline order", f"cannot read 'inline order': a pipeline looks like {manager.DEFAULT!r}"),
        ("inline,order(window=1", f"cannot read 'order(window=1': a pipeline looks like {manager.DEFAULT!r}"),
        ("inline,!?", f"cannot read '!?': a pipeline looks like {manager.DEFAULT!r}"),
    ],
)
def test_an_error_names_the_part_that_is_wrong(text: str, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        manager.parse(text)


def test_a_number_too_large_for_a_float_is_a_bad_number():
    with pytest.raises(ValueError, match="regroup"):
        manager.parse(f"regroup(cap={'9' * 400})")


@dataclass
class Fake:
    """A pass that does what it is told, to the module."""

    name: str
    act: Callable[[Module], Any] = lambda module: None
    needs_plan: bool = False
    summary: str = ""
    given: Any = "not run"

    def run(self, run_on: Module, plan: Any) -> PassResult:
        self.given = plan
        self.act(run_on)
        return PassResult(True, {f"runs of {self.name}": 1})


def one() -> Module:
    return module(body("step", "x -> x"))


def never(_: Module) -> Any:
    raise AssertionError("no pass needs a plan")


def test_the_plan_is_decided_once_and_only_when_a_pass_needs_it():
    asked: list[str] = []
    first = Fake("first", lambda m: asked.append("first ran"))
    passes = [first, Fake("second", needs_plan=True), Fake("third", needs_plan=True)]
    manager.run(passes, one(), lambda m: asked.append(f"decide {m.root.name}") or {})
    assert asked == ["first ran", "decide step"]
    assert [p.given for p in passes] == [None, {}, {}]


def test_nothing_is_decided_when_no_pass_needs_a_plan():
    assert manager.run([Fake("first")], one(), never) == {"first": {"runs of first": 1}}


def test_what_decide_raises_is_passed_on_as_it_is():
    problem = KeyError("ranks differ")

    def decide(_: Module) -> Any:
        raise problem

    with pytest.raises(KeyError) as error:
        manager.run([Fake("first", needs_plan=True)], one(), decide)
    assert error.value is problem


@pytest.mark.parametrize("problem", [GraphError("step: bad"), KeyError("r"), ZeroDivisionError("r")])
def test_what_a_pass_raises_becomes_an_error_that_names_the_pass(problem: Exception):
    def fail(_: Module) -> None:
        raise problem

    with pytest.raises(manager.PassError) as error:
        manager.run([Fake("first"), Fake("second", fail)], one(), never)
    assert str(error.value) == f"pass second failed: {problem}"
    assert error.value.__cause__ is problem


def spoil(name: str) -> Callable[[Module], None]:
    def act(spoiled: Module) -> None:
        spoiled.bodies[name].graph.node.append(identity("a", "gone"))
        spoiled.bodies[name].changed = True

    return act


@pytest.mark.parametrize("name", ["unused", "root"])
def test_a_pass_that_leaves_a_malformed_graph_is_named(name: str):
    ran = Fake("third")
    both = module(body("unused", "x -> x"), body("root", "x -> x"))
    with pytest.raises(manager.PassError, match=f"pass second failed: {name}: a reads gone, which does not exist"):
        manager.run([Fake("first"), Fake("second", spoil(name)), ran], both, never)
    assert ran.given == "not run"


def test_the_verifier_is_given_the_numbers_of_outputs():
    def act(changed: Module) -> None:
        changed.root.ret["out0"] = "x:3"
        changed.root.changed = True

    with pytest.raises(manager.PassError, match="pass first failed: step: output out0 reads x:3, but x has 1 outputs"):
        manager.run([Fake("first", act)], one(), never, outputs=lambda n: 1)


def test_a_body_that_no_pass_changed_is_not_verified():
    broken = module(body("leaf", "x -> gone"), body("step", "x -> x"))
    manager.run([Fake("first")], broken, never)


def test_observe_is_called_before_the_first_pass_and_after_each():
    seen: list[tuple[str, str]] = []
    passes = [Fake("first"), Fake("second")]
    manager.run(passes, one(), never, observe=lambda label, m: seen.append((label, m.root.name)))
    assert seen == [("before", "step"), ("after_first", "step"), ("after_second", "step")]


def test_the_default_pipeline_inlines_regroups_and_orders():
    callee = body("reduce", "g h k -> r s t", *(allreduce(r, g) for r, g in zip("rst", "ghk", strict=True)))
    step = body("step", "x -> c c:1 c:2", node("g", "Split", "x"), call("c", "reduce", "g g:1 g:2"))
    plan = {"step": BodyPlan([Batch("m0", ("c/t", "c/s")), Batch("m1", ("c/r",))])}
    statistics = manager.run(manager.parse(manager.DEFAULT), module(callee, step), lambda _: plan)
    expect(step, "x -> m1 m0:1 m0", node("g", "Split", "x"), batch("m0", "c/t c/s", "g:2 g:1", "?;?"),
           batch("m1", "c/r", "g ^m0"))  # fmt: skip
    assert statistics == {
        "inline": {"calls inlined": 1},
        "untie": {"ties": 0},
        "chunk": {"gradients cut": 0, "slices": 0},
        "regroup": {"collectives merged": 2, "batches": 2},
        "order": {"control edges": 1},
        "schedule": {"control edges": 0},
        "defer": {"pending": 0, "ops moved": 0},
    }
