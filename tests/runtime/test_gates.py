"""Edges into the ops that `ops.GATES` names lose none of TensorFlow's fusions; edges into others do."""

from __future__ import annotations

import collections

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from graph_passes import ops
from graph_passes.dataflow import dataflow
from graph_passes.graph import GraphView
from tf_caramel.runtime import tf_private

FOLDED = ("Const", "Identity", "NoOp")  # Grappler makes and removes these as it likes


def layers():
    keras = tf.keras.layers
    return [
        keras.Conv2D(8, 3, padding="same"), keras.BatchNormalization(), keras.ReLU(), keras.MaxPooling2D(),
        keras.DepthwiseConv2D(3, padding="same"), keras.ReLU(6.0), keras.Conv2D(8, 3, activation="relu"),
        keras.Flatten(), keras.Dense(16, activation="tanh"), keras.Dense(16, activation="sigmoid"),
        keras.Dense(16, activation="elu"), keras.Dense(16, activation="relu"), keras.Dense(4),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def step():
    """A train step of a small model that has every kind of gate, as a ConcreteFunction, and its arguments."""
    model = tf.keras.Sequential([tf.keras.Input((12, 12, 3)), *layers()])
    x, y = tf.random.stateless_uniform((4, 12, 12, 3), (1, 2)), tf.zeros(4, tf.int32)
    variables = [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            # The fused batch normalisation, which Keras 3 does not use.
            extra, _, _ = tf.compat.v1.nn.fused_batch_norm(variables[0], tf.ones(8), tf.zeros(8))
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores)) + tf.reduce_sum(extra**2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    return train.get_concrete_function(x, y), (x, y)


def executed(concrete, arguments):
    """How many of each op the runtime really runs."""
    owner = context.context()
    owner.enable_graph_collection()
    try:
        concrete(*arguments)
        graphs = owner.export_run_metadata().function_graphs
    finally:
        owner.disable_graph_collection()
    (graph,) = [g for g in graphs if any(n.op == "ReadVariableOp" for p in g.partition_graphs for n in p.node)]
    nodes = [n for p in graph.partition_graphs for n in p.node if n.op not in FOLDED]
    return collections.Counter(n.op for n in nodes), sum(x.startswith("^") for n in nodes for x in n.input)


def gated(concrete, chosen):
    """Adds an edge into each of the nodes `chosen(body)`, from an op that comes before; returns which have one now."""
    tf_private.restore(concrete)
    module = tf_private.to_module(tf_private.function_defs(tf_private.function_name(concrete)))
    view = GraphView(module.root)
    above: dict[str, set[str]] = {}
    for name in view.order:
        above[name] = {p for source in view.producers[name] for p in (source, *above[source])}
    wanted = {name: [s for s in view.order if view.order[s] < view.order[name] and s not in above[name]
                     and "Grad" in view.nodes[s].op] for name in chosen(module.root)}  # fmt: skip
    for name, sources in wanted.items():
        if sources:
            view.nodes[name].input.append("^" + sources[-1])
    module.root.changed = True
    tf_private.swap(concrete, tf_private.build(concrete, module))
    return sorted(name for name, sources in wanted.items() if sources)


def test_edges_into_gates_lose_no_fusion(step):
    concrete, arguments = step
    before, edges_before = executed(concrete, arguments)
    kinds = collections.Counter()

    def gates(body):
        found = dataflow(body).gates
        kinds.update(node.op for node in body.graph.node if node.name in found)
        return sorted(found)

    reached = gated(concrete, gates)
    after, edges_after = executed(concrete, arguments)
    assert set(kinds) >= ops.GATES, "the model has not every kind of gate"
    assert len(reached) > len(kinds)
    assert edges_after > edges_before
    assert after == before


def test_edges_into_a_weight_gradient_that_is_fused_with_the_bias_gradient_lose_that(step):
    concrete, arguments = step
    gated(concrete, lambda body: [])  # built anew: a function that ran before is not collected again
    before, _ = executed(concrete, arguments)
    assert gated(concrete, lambda body: [n.name for n in body.graph.node if n.op == "Conv2DBackpropFilter"])
    after, _ = executed(concrete, arguments)
    assert after != before
