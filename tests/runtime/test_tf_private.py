"""FunctionDef to GraphDef and back on live functions; the swap and its undoing; the self-test and what it guards."""

from __future__ import annotations

import gc
import logging

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from graph_passes import manager
from graph_passes.graph import verify
from tf_caramel.config import Config
from tf_caramel.runtime import hook, tf_private


def load(concrete):
    return tf_private.to_module(tf_private.function_defs(tf_private.function_name(concrete)))


def doubled(concrete):
    """The module of a function that adds 2.0, with that constant made 20.0."""
    module = load(concrete)
    for body in module.bodies.values():
        for node in body.graph.node:
            if node.op == "Const" and list(node.attr["value"].tensor.float_val) == [2.0]:
                node.attr["value"].tensor.float_val[0] = 20.0
                body.changed = True
    return module


def test_a_swapped_function_keeps_captures_side_effects_and_outputs_and_can_be_restored():
    total = tf.Variable(0.0)

    @tf.function
    def add(x):
        total.assign_add(x + 2.0)
        return {"sum": total.read_value(), "input": x}

    concrete = add.get_concrete_function(tf.constant(1.0))
    tf_private.swap(concrete, tf_private.build(concrete, doubled(concrete)))
    assert add(tf.constant(1.0))["sum"].numpy() == 21.0
    tf_private.restore(concrete)
    assert add(tf.constant(1.0))["sum"].numpy() == 24.0


def test_a_change_in_a_nested_function_or_loop_reaches_the_root():
    @tf.function
    def inner(x):
        return x + 2.0

    @tf.function
    def outer(x):
        for _ in tf.range(3):
            x = inner(x)
        return x

    concrete = outer.get_concrete_function(tf.constant(0.0))
    module = doubled(concrete)
    assert len(module.bodies) > 2
    tf_private.swap(concrete, tf_private.build(concrete, module))
    assert outer(tf.constant(0.0)).numpy() == 60.0


def test_a_swapped_function_without_outputs_still_acts():
    total = tf.Variable(0.0)

    @tf.function
    def add():
        total.assign_add(2.0)

    concrete = add.get_concrete_function()
    tf_private.swap(concrete, tf_private.build(concrete, doubled(concrete)))
    add()
    assert total.numpy() == 20.0


def test_an_unchanged_round_trip_verifies_and_computes_the_same():
    @tf.function
    def function(x):
        parts = tf.split(x, 3)
        return tf.nest.map_structure(tf.square, parts), tf.cond(x[0] > 0, lambda: x, lambda: -x)

    x = tf.constant([1.0, 2.0, 3.0])
    concrete = function.get_concrete_function(x)
    before = tf.nest.map_structure(lambda t: t.numpy().tolist(), concrete(x))
    module = load(concrete)
    for body in module.bodies.values():
        verify(body, tf_private.output_count)
        body.changed = True
    tf_private.swap(concrete, tf_private.build(concrete, module))
    assert tf.nest.map_structure(lambda t: t.numpy().tolist(), concrete(x)) == before


def test_registered_functions_go_when_their_function_goes():
    def rewritten():
        return {name for name in context.context().list_function_names() if "_caramel_" in str(name)}

    @tf.function
    def inner(x):
        return x + 2.0

    outer = tf.function(lambda x: inner(x) + inner(x))
    concrete = outer.get_concrete_function(tf.constant(0.0))
    before = rewritten()
    tf_private.swap(concrete, tf_private.build(concrete, doubled(concrete)))
    assert len(rewritten() - before) == 2
    del concrete, outer
    gc.collect()
    assert rewritten() == before


def test_the_self_test_passes_here_and_while_something_else_is_traced():
    assert tf_private.self_test() is None
    found = []

    @tf.function
    def step(x):
        found.append(tf.autograph.experimental.do_not_convert(tf_private.self_test)())
        return x

    step(tf.constant(1.0))
    assert found == [None]


@pytest.mark.parametrize(
    ("part", "broken", "text"),
    [
        ("_install", lambda concrete, atomic: None, "gave 3.0 and the restored one 3.0"),
        ("function_name", lambda concrete: concrete.no_such_attribute, "AttributeError"),
        ("add_hooks", lambda on_graph, on_function: None, "the hooks saw 0 events instead of 2"),
    ],
)
def test_a_failed_self_test_switches_rewriting_off_with_one_line(monkeypatch, caplog, part, broken, text):
    monkeypatch.setattr(tf_private, part, broken)
    with caplog.at_level(logging.WARNING, logger="tf_caramel"):
        hook.install(Config(enabled=True))
        assert not hook.usable()
        assert hook.install(Config(enabled=True)) is None
    hook.uninstall()
    (record,) = caplog.records
    assert "rewriting is off: the self-test fails on TensorFlow" in record.message
    assert text in record.message


def test_installing_twice_is_one_hook_and_another_pipeline_is_refused():
    config = Config(enabled=True, pipeline=manager.DEFAULT)
    try:
        first = hook.install(config)
        assert first is not None
        assert hook.install(config) is first
        assert hook.usable()
        with pytest.raises(RuntimeError, match="it cannot be changed to"):
            hook.install(Config(enabled=True, pipeline="inline"))
    finally:
        hook.uninstall()
    assert not hook.usable()
