"""defer: a step becomes a start, a middle and a flush, which together compute what the step computed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import tensor_pb2, types_pb2

from graph_passes.defer import FLUSH, MIDDLE, START, Defer, copied, prospects
from graph_passes.deferral import followers, needs
from graph_passes.graph import Body, GraphError, GraphView, Module, verify
from graph_passes.pass_base import Batch, BodyPlan
from tests.graph_passes.graphs import allreduce, body, branch, call, identity, module, node
from tests.graph_passes.run import F, run


def number(name: str, value: float) -> Any:
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[value])
    return node(name, "Const", dtype="DT_FLOAT", value=tensor)


def read(name: str, inputs: str) -> Any:
    return node(name, "ReadVariableOp", inputs, dtype="DT_FLOAT")


def assign(name: str, inputs: str, kind: str = "") -> Any:
    return node(name, f"Assign{kind}VariableOp", inputs, dtype="DT_FLOAT")


def op(name: str, kind: str, inputs: str) -> Any:
    return node(name, kind, inputs, T="DT_FLOAT")


def momentum(*more: Any, signature: str = "p m x lr -> loss ^u", c: Any = None) -> Body:
    """p -= lr * m, where m = 0.5 * m - the reduced gradient p * x * x; the loss is p * x."""
    return body(
        "step",
        signature,
        read("p_read", "p"),
        op("y", "Mul", "p_read x"),
        op("g", "Mul", "y x"),
        c or allreduce("c", "g", ""),
        number("half", 0.5),
        read("m_read", "m"),
        op("decayed", "Mul", "m_read half"),
        op("m_new", "Sub", "decayed c"),
        assign("m_write", "m m_new ^m_read"),
        read("m_again", "m ^m_write"),
        op("change", "Mul", "m_again lr"),
        assign("u", "p change ^p_read", "Sub"),
        op("loss", "Identity", "y ^u"),
        *more,
        resources="p m q q0 q1 q2",
    )


def deferred(one: Module | Body, phase: str, batches: str = "c", window: int = 1) -> Module:
    whole = copied(one if isinstance(one, Module) else module(one))
    names = batches.split()
    plan = BodyPlan([Batch(b, (b,)) for b in names], window, deferred=len(names), phase=phase)
    Defer().run(whole, {"step": plan})
    for changed in whole.bodies.values():
        verify(changed)
    return whole


def nodes_of(one: Body) -> dict[str, Any]:
    return {n.name: n for n in one.graph.node}


def test_what_moves_is_what_takes_the_reduced_gradient_and_what_touches_state_after_it():
    (one,) = followers(momentum(), ["c"])
    assert one.obstacle is None
    assert set(one.moved) == {"c", "m_new", "m_write", "m_again", "change", "u"}
    assert one.written == {"m": ("m_write",), "p": ("u",)}


def test_state_is_read_anew_and_what_the_step_decided_is_kept():
    step = momentum()
    found = needs(GraphView(step), followers(step, ["c"]))
    assert found.cloned == ("m_read", "decayed")
    assert found.kept == ("lr",)


def test_the_start_keeps_and_sends_nothing():
    start = deferred(momentum(), START).root
    assert not {"c", "m_new", "m_write", "m_again", "change", "u"} & set(nodes_of(start))
    keeps = {n.name: n.input[1] for n in start.graph.node if n.name.endswith("/keep")}
    assert sorted(keeps.values()) == ["g", "lr"]
    assert start.control_ret == {"u": "caramel_kept"}
    assert "^caramel_pending/c/stage/kept" in nodes_of(start)["caramel_kept"].input
    assert {f"^{name}" for name in keeps} <= set(nodes_of(start)["caramel_pending/c/stage/kept"].input)


def test_the_middle_s_readers_wait_for_their_update_only():
    middle = nodes_of(deferred(momentum(), MIDDLE).root)
    assert list(middle["p_read"].input) == ["p", "^u"]
    assert list(middle["c"].input) == ["caramel_pending/c/0/read", "^caramel_pending/c/stage/applying"]
    assert "^p_read" not in middle["u"].input  # the reads of the step before are over
    assert "^m_read/caramel_again" in middle["m_write"].input
    assert "^caramel_pending/c/0/read" in middle["caramel_pending/c/0/keep"].input


def test_the_middle_s_head_waits_for_the_step_s_data():
    middle = nodes_of(deferred(momentum(), MIDDLE).root)
    for name in ("caramel_pending/c/0/read", "m_read/caramel_again"):
        assert {"^x", "^lr"} <= set(middle[name].input)


def test_the_flush_needs_the_variables_only():
    flush = deferred(momentum(), FLUSH).root
    assert flush.args == ["p", "m"]
    assert list(flush.ret) == ["stage"]  # a constant
    assert "y" not in nodes_of(flush)
    assert "g" not in nodes_of(flush)


def head(batches: str, window: int) -> dict[str, set[str]]:
    """What each batch of a head of c, d, e, f waits for, but for what all wait for."""
    more = [n for name in "def" for n in (op(f"g{name}", "Mul", "y y"), allreduce(name, f"g{name}", ""))]
    more += [assign(f"u{name}", f"q{k} {name}", "Sub") for k, name in enumerate("def")]
    step = momentum(*more, signature="p m q0 q1 q2 x lr -> loss ^u ^ud ^ue ^uf")
    nodes = nodes_of(deferred(step, MIDDLE, batches, window).root)
    waits = {b: {i[1:] for i in nodes[b].input if i.startswith("^")} for b in batches.split()}
    return {b: found - set.intersection(*waits.values()) for b, found in waits.items()}


@pytest.mark.parametrize("window", [0, 1, 2])
def test_the_head_s_batches_go_one_by_one_whatever_the_window(window: int):
    assert head("d c e f", window) == {"d": set(), "c": {"d"}, "e": {"c"}, "f": {"e"}}


@pytest.mark.parametrize(
    ("more", "signature", "reason"),
    [
        ([identity("out", "c")], "p m x lr -> loss out ^u", "out is returned, and depends on the reduced gradient"),
        ([allreduce("d", "m_new", "")], "p m x lr -> loss ^u ^d", "another collective, d, depends on it"),
        ([call("f", "other", "c")], "p m x lr -> loss ^u ^f", "f (PartitionedCall) depends on the reduced gradient"),
        ([node("r", "RandomUniform", "c")], "p m x lr -> loss ^u ^r", "r (RandomUniform) depends on the reduced"),
        ([assign("w", "m x")], "p m x lr -> loss ^u ^w", "m is also written by w, and nothing says whether before"),
        ([read("seen", "p ^u")], "p m x lr -> seen ^u", "seen is returned, and depends on the reduced gradient"),
    ],
)
def test_what_cannot_move_is_recognised(more: list[Any], signature: str, reason: str):
    (one, *_) = followers(momentum(*more, signature=signature), ["c"])
    assert one.obstacle is not None
    assert reason in one.obstacle


def test_updates_that_need_several_gradients_stay():
    clipped = body(
        "step",
        "p q x y -> ^u ^v",
        allreduce("c", "x", ""),
        allreduce("d", "y", ""),
        op("norm", "AddV2", "c d"),
        op("a", "Mul", "c norm"),
        op("b", "Mul", "d norm"),
        assign("u", "p a", "Sub"),
        assign("v", "q b", "Sub"),
        resources="p q",
    )
    reasons = [one.obstacle for one in followers(clipped, ["c", "d"])]
    assert all(reason is not None and "needs several reduced gradients" in reason for reason in reasons)


def test_weight_decay_before_the_update_stays_in_its_step():
    decayed = momentum(
        op("wd", "Mul", "p_read half"), assign("decay", "p wd ^p_read", "Sub"), signature="p m x lr -> loss ^u ^decay"
    )
    nodes_of(decayed)["u"].input.append("^decay")
    (one,) = followers(decayed, ["c"])
    assert one.obstacle is None
    middle = nodes_of(deferred(decayed, MIDDLE).root)
    assert "^u" in middle["decay"].input
    assert "^decay" not in middle["u"].input


def loop(*more: Any, inside: str = "step") -> Module:
    """A loop over the step that returns the turns and the last loss."""
    turn = body(
        "turn",
        "n loss p m x lr -> next out p m x lr ^s",
        number("one", 1.0),
        op("next", "Sub", "n one"),
        call("s", inside, "p m x lr"),
        identity("out", "s"),
        resources="p m",
    )
    root = body(
        "root",
        "n loss p m x lr -> w:1 ^w",
        node("w", "While", "n loss p m x lr", cond="more", body="turn"),
        *more,
        resources="p m",
    )
    root.graph.node[-1 - len(more)].attr["T"].list.type.extend([1, 1, 20, 20, 1, 1])
    test = body("more", "n loss p m x lr -> n", resources="p m")
    return module(momentum(), test, turn, root)


def test_a_loop_starts_with_its_first_turn():
    start = deferred(loop(), START)
    root = nodes_of(start.root)
    assert root["w/caramel_first"].attr["then_branch"].func.name == "turn_starting"
    assert nodes_of(start.bodies["turn_starting"])["s"].attr["f"].func.name == "step_starting"
    assert root["w"].attr["body"].func.name == "turn"
    assert nodes_of(start.bodies["turn"])["s"].attr["f"].func.name == "step"
    assert "c" in nodes_of(start.bodies["step"])
    assert "c" not in nodes_of(start.bodies["step_starting"])
    assert list(root["w"].input) == [
        "w/caramel_first", "w/caramel_first:1", "p", "m", "x", "lr", "^w/caramel_first",
    ]  # fmt: skip


def test_a_variable_that_the_caller_looks_at_is_not_deferred():
    (one, *_) = prospects(whole := loop(read("peek", "p ^w")), whole.bodies["step"])
    assert one.obstacle == "p is touched outside the step, by peek"


def test_a_step_in_a_branch_is_not_deferred():
    root = body("root", "t p m x lr -> ", branch("b", "step", "step2", "t p m x lr"), resources="p m")
    whole = module(momentum(), root)
    (one, *_) = prospects(whole, whole.bodies["step"])
    assert one.obstacle == "step runs in a branch, b"
    with pytest.raises(GraphError, match="c cannot be deferred: step runs in a branch"):
        deferred(whole, MIDDLE)


def test_without_a_phase_nothing_changes():
    step = momentum()
    before = text_format.MessageToString(step.graph)
    assert not Defer().run(module(step), {"step": BodyPlan([Batch("c", ("c",))], deferred=1)}).changed
    assert text_format.MessageToString(step.graph) == before


@st.composite
def optimizers(draw: Any) -> tuple[Body, list[str]]:
    """Two to four parameters, each with an optimizer of its own, and which of their collectives are deferred."""
    nodes: list[Any] = [
        read("it", "i"), number("one", 1.0), assign("i_write", "i one ^it", "Add"), number("small", 0.125)
    ]  # fmt: skip
    handles, controls, forward = ["i"], ["i_write"], "x"
    count = draw(st.integers(2, 4))
    for k in range(count):
        nodes += [read(f"r{k}", f"p{k}"), op(f"f{k}", "Mul", f"{forward} r{k}")]
        forward = f"f{k}"
    for k in range(count):
        handles += [f"p{k}", f"s{k}"]
        nodes += [op(f"g{k}", "Mul", f"{forward} r{k}"), allreduce(f"c{k}", f"g{k}", "")]
        before = f"^r{k}"
        if draw(st.booleans()):  # weight decay
            nodes += [op(f"wd{k}", "Mul", f"r{k} small"), assign(f"decay{k}", f"p{k} wd{k} ^r{k}", "Sub")]
            before = f"^decay{k}"
            controls.append(f"decay{k}")
        values = [f"c{k}", "small", "it", f"s_read{k}"]
        nodes.append(read(f"s_read{k}", f"s{k}"))
        for n in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["AddV2", "Sub", "Mul"]))
            nodes.append(op(f"e{k}_{n}", kind, f"{draw(st.sampled_from(values))} {draw(st.sampled_from(values))}"))
            values.append(f"e{k}_{n}")
        nodes += [
            op(f"t{k}", "AddV2", f"{values[-1]} c{k}"),
            op(f"slot{k}", "Mul", f"t{k} small"),
            assign(f"s_write{k}", f"s{k} slot{k} ^s_read{k}"),
            read(f"s_after{k}", f"s{k} ^s_write{k}"),
            op(
                f"d{k}", draw(st.sampled_from(["AddV2", "Mul"])), f"s_after{k} {draw(st.sampled_from(['it', 'small']))}"
            ),
            op(f"ch{k}", "Mul", f"d{k} small"),
            assign(f"u{k}", f"p{k} ch{k} {before}", "Sub"),
        ]
        controls += [f"s_write{k}", f"u{k}"]
        if draw(st.booleans()):  # a moving average
            handles.append(f"a{k}")
            nodes += [
                read(f"p_after{k}", f"p{k} ^u{k}"),
                read(f"a_read{k}", f"a{k}"),
                op(f"a_new{k}", "Sub", f"p_after{k} a_read{k}"),
                assign(f"a_write{k}", f"a{k} a_new{k} ^a_read{k}"),
            ]
            controls.append(f"a_write{k}")
    chosen = draw(st.lists(st.sampled_from([f"c{k}" for k in range(count)]), min_size=1, unique=True))
    signature = f"{' '.join(handles)} x -> out {' '.join('^' + c for c in controls)}"
    end = op("out", "Identity", f"{forward} {' '.join('^' + c for c in controls)}")
    return body("step", signature, *nodes, end, resources=" ".join(handles)), chosen


@given(optimizers(), st.integers(0, 2**30), st.lists(st.booleans(), min_size=1, max_size=4), st.integers(1, 2))
@settings(max_examples=80, deadline=None)
def test_any_optimizer_computes_the_same_bits(
    drawn: tuple[Body, list[str]], seed: int, flushes: list[bool], window: int
):
    step, chosen = drawn
    phases = {p: deferred(step, p, " ".join(chosen), window).root for p in (START, MIDDLE, FLUSH)}
    rng = random.Random(seed)
    plain = {arg: F(rng.uniform(-1, 1)) for arg in step.args if arg != "x"}
    retimed, pending = dict(plain), False
    for flush in flushes:
        x = {"x": F(rng.uniform(-1, 1))}
        with np.errstate(all="ignore"):
            expected, _ = run(step, x, plain, rng.random())
            got, sent = run(phases[MIDDLE if pending else START], x, retimed, rng.random())
            assert got[0].tobytes() == expected[0].tobytes()
            if pending:
                assert [name for name in sent if name in chosen] == chosen
            pending = True
            if flush:
                run(phases[FLUSH], {}, retimed, rng.random())
                pending = False
                assert {k: retimed[k].tobytes() for k in plain} == {k: v.tobytes() for k, v in plain.items()}
    if pending:
        run(phases[FLUSH], {}, retimed, rng.random())
    assert {k: retimed[k].tobytes() for k in plain} == {k: v.tobytes() for k, v in plain.items()}
