"""The models of the benchmarks, and the emulated accelerator: what it waits for, what depends on what, its values."""

from __future__ import annotations

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from examples.benchmarks import accelerator
from examples.benchmarks.layer_times import LayerTimes, Times, from_file, from_flops
from examples.benchmarks.models import MODELS, data

layers = keras.layers


def net():
    """A branch, a layer used twice, a depthwise convolution and a frozen layer; two outputs."""
    image, extra = keras.Input((8, 8, 3), name="image"), keras.Input((4,), name="extra")
    x = layers.ReLU(name="relu")(layers.Conv2D(4, 3, strides=2, padding="same", name="first")(image))
    a = layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise")(x)
    a = layers.BatchNormalization(name="norm")(a)
    joined = layers.Concatenate(name="joined")([layers.Add(name="sum")([a, x]), x])
    flat = layers.Dense(4, name="frozen", trainable=False)(layers.Flatten(name="flat")(joined))
    twice = layers.Dense(4, name="twice")
    y = twice(twice(layers.Multiply(name="times")([flat, extra])))
    return keras.Model([image, extra], [layers.Dense(10, name="classes")(y), y])


def fed(batch=6, seed=0):
    rng = np.random.RandomState(seed)
    return [rng.rand(batch, 8, 8, 3).astype("f4"), rng.rand(batch, 4).astype("f4")]


def step_of(model):
    @tf.function
    def step(*x):
        with tf.GradientTape() as tape:
            out = tf.nest.flatten(model(list(x), training=True))
            loss = tf.add_n([tf.reduce_mean(tf.square(o)) for o in out])
        return tape.gradient(loss, model.trainable_variables)

    return step


@pytest.fixture
def waited(monkeypatch):
    """Waits are noted, not waited for."""
    seconds: list[float] = []
    monkeypatch.setattr(accelerator.STREAM, "wait", seconds.append)
    return seconds


def of_one_layer(layer, shape, batch=1):
    model = keras.Sequential([keras.Input(shape), layer])
    return from_flops(model, batch, 1e-12).layers.get(layer.name)


# ---------------------------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize("name", MODELS)
def test_a_model_its_data_and_its_waiting_form_fit_together(name):
    model, (x, y) = MODELS[name].build(), data(name, 3, 0)
    assert x.shape == (3, *model.inputs[0].shape[1:])
    assert y.shape == (3,)
    assert tuple(model.outputs[0].shape) == (None, 10)
    made = accelerator.waiting(model, from_flops(model, 3, 1.0))
    assert len(made.trainable_weights) == len(model.trainable_weights)
    assert all(a is b for a, b in zip(made.trainable_weights, model.trainable_weights, strict=True))
    assert tuple(made.outputs[0].shape) == (None, 10)


@pytest.mark.parametrize("name", MODELS)
def test_data_follow_from_the_seed(name):
    (x, y), (again, labels), (other, _) = data(name, 8, 1), data(name, 8, 1), data(name, 8, 2)
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(y, labels)
    assert (x != other).any()
    assert set(y) <= set(range(10))


def test_the_gradient_of_the_token_table_is_sparse_and_that_of_the_positions_is_not():
    model, (x, y) = MODELS["bert"].build(), data("bert", 2, 0)
    with tf.GradientTape() as tape:
        loss = MODELS["bert"].loss()(y, model(x, training=True))
    tokens, positions = tape.gradient(loss, model.trainable_variables[:2])
    assert isinstance(tokens, tf.IndexedSlices)
    assert positions.shape == (64, 256)


# --------------------------------------------------------------------------------------------------------------- times


@pytest.mark.parametrize(
    ("layer", "shape", "flops"),
    [
        (layers.Conv2D(5, 3, strides=2, padding="same"), (8, 8, 3), 2 * 9 * 3 * 5 * 16),
        (layers.DepthwiseConv2D(3, depth_multiplier=2), (8, 8, 4), 2 * 9 * 4 * 2 * 36),
        (layers.SeparableConv2D(6, 3, padding="same"), (8, 8, 4), 2 * (9 * 4 + 4 * 6) * 64),
        (layers.Conv2DTranspose(5, 3, strides=2), (4, 4, 2), 2 * 9 * 2 * 5 * 16),
        (layers.Dense(7), (3, 5), 2 * 5 * 7 * 3),
        (layers.LSTM(5), (4, 3), 2 * (3 + 5) * 4 * 5 * 4),
        (layers.Embedding(50, 6), (4,), 4 * 6),
        (layers.BatchNormalization(), (4, 4, 2), 8 * 32),
        (layers.LayerNormalization(), (4, 2), 8 * 8),
    ],
)
def test_the_flops_of_a_layer(layer, shape, flops):
    assert of_one_layer(layer, shape, batch=3) == (3 * flops, 3 * flops, 0)


def test_the_flops_of_attention_are_those_of_its_projections_and_products():
    queries, keys = keras.Input((3, 8)), keras.Input((5, 8))
    model = keras.Model([queries, keys], layers.MultiHeadAttention(2, 4, name="attention")(queries, keys))
    projections, products = 2 * (2 * 8 * 8 * 3 + 2 * 8 * 8 * 5), 4 * 3 * 5 * 2 * 4
    assert from_flops(model, 1, 1e-12).layers["attention"].forward == projections + products


def test_layers_without_weights_take_no_time_and_an_unknown_matrix_is_an_error():
    class Odd(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(name="w", shape=(8, 8))

        def call(self, x):
            return x @ self.w

    assert of_one_layer(layers.ReLU(), (8,)) is None
    with pytest.raises(ValueError, match=r"layer odd1 \(Odd\) are not known"):
        of_one_layer(Odd(name="odd1"), (8,))


def test_gradients_that_nobody_needs_take_no_time_and_a_layer_used_twice_takes_twice():
    times = from_flops(net(), 1, 1e-12).layers
    first = 2 * 9 * 3 * 4 * 16
    assert times["first"] == (first, first, 0)
    assert times["frozen"] == (2 * 128 * 4, 0, 2 * 128 * 4)
    assert times["twice"] == (2 * 32, 2 * 32, 2 * 32)


def test_a_model_within_the_model_has_the_flops_of_its_layers():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(5)], name="inner")
    assert of_one_layer(inner, (4,)).forward == 2 * (4 * 3 + 3 * 5)


def test_scaling_keeps_the_proportions():
    times = Times({"a": LayerTimes(1.0, 2.0, 0.0), "b": LayerTimes(3.0, 3.0, 1.0)}).scaled(0.5)
    assert times.total == pytest.approx(0.5)
    assert times.layers["b"] == pytest.approx((0.15, 0.15, 0.05))
    with pytest.raises(ValueError, match="total"):
        Times({}).scaled(1.0)
    with pytest.raises(ValueError, match="total"):
        times.scaled(math.nan)


def test_a_profile_file_is_read(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"a": {"forward": 0.1, "weight_gradient": 0.2, "input_gradient": 0}}))
    assert from_file(file).layers == {"a": (0.1, 0.2, 0.0)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "an object"),
        ('{"a": 3}', "layer a: an object with forward, weight_gradient, input_gradient"),
        ('{"a": {"forward": 1, "input_gradient": 0}}', "layer a: weight_gradient is None"),
        ('{"a": {"forward": NaN, "weight_gradient": 0, "input_gradient": 0}}', "layer a: forward is nan"),
        ('{"a": {"forward": 1, "weight_gradient": 0, "input_gradient": -2}}', "layer a: input_gradient is -2"),
        ('{"a": {"forward": true, "weight_gradient": 0, "input_gradient": 0}}', "layer a: forward is True"),
        ('{"a": {"forwards": 1}}', "layer a: unknown field forwards"),
    ],
)
def test_what_is_wrong_with_a_profile_file_is_said_with_file_and_field(tmp_path, text, words):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="profile.json: " + words):
        from_file(file)


def test_times_that_do_not_fit_the_model_are_refused():
    model = net()
    good = from_flops(model, 1, 1.0).layers
    without = {name: times for name, times in good.items() if name != "norm"}
    with pytest.raises(ValueError, match=r"x\.json: no times for layer norm"):
        accelerator.waiting(model, Times(without, "x.json"))
    with pytest.raises(ValueError, match=r"x\.json: .* has no layer ghost"):
        accelerator.waiting(model, Times({**good, "ghost": good["norm"]}, "x.json"))


# ------------------------------------------------------------------------------------------------------- waiting models


def test_one_step_waits_for_exactly_the_total(waited):
    model = net()
    times = Times({**from_flops(model, 4, 1e-3).layers, "relu": LayerTimes(0.25, 0.0, 0.25)}).scaled(2.0)
    step_of(accelerator.waiting(model, times))(*map(tf.constant, fed()))
    assert sum(waited) == pytest.approx(2.0)


def test_gradients_have_the_shapes_of_the_weights_are_finite_and_depend_on_weights_and_data(waited):
    model = net()
    made = accelerator.waiting(model, from_flops(model, 4, 1.0))
    step = step_of(made)
    before, other = step(*map(tf.constant, fed())), step(*map(tf.constant, fed(seed=1)))
    assert [g.shape for g in before] == [tuple(w.shape) for w in made.trainable_weights]
    assert all(np.isfinite(g).all() for g in before)
    assert all((a.numpy() != b.numpy()).any() for a, b in zip(before, other, strict=True))
    twice = model.get_layer("twice").trainable_weights[0]
    only_last = np.zeros((4, 4), "f4")
    only_last[-1, -1] = 0.5
    for change, concerns in ((only_last, "its own gradient"), (0.5, "all gradients")):
        twice.assign(twice + change)
        after = step(*map(tf.constant, fed()))
        changed = [(a.numpy() != b.numpy()).any() for a, b in zip(before, after, strict=True)]
        own = [w is twice for w in made.trainable_weights]
        assert changed == (own if concerns == "its own gradient" else [True] * len(own))


def test_waits_read_the_weights_and_the_two_gradients_of_a_layer_do_not_wait_for_each_other():
    model = net()
    step = step_of(accelerator.waiting(model, from_flops(model, 4, 1.0)))
    graph = step.get_concrete_function(*[tf.TensorSpec(x.shape, tf.float32) for x in fed()]).graph
    ops = {"/".join(op.name.split("/")[-2:]): op for op in graph.get_operations() if op.type.startswith("PyFunc")}
    for name in ("first", "depthwise", "norm", "classes"):
        count = len(model.get_layer(name).trainable_weights)
        assert len(reads(ops[f"{name}/forward"])) == count
        assert reads(ops[f"{name}/input_gradient"]) == reads(ops[f"{name}/forward"])
        weight, input_ = ops[f"{name}/weight_gradient"], ops[f"{name}/input_gradient"]
        assert weight not in ancestors(input_)
        assert input_ not in ancestors(weight)
        assert ops[f"{name}/forward"] in ancestors(weight) | ancestors(input_) or name == "classes"
        gradients = [op for op in graph.get_operations() if op.name.startswith(f"{name}/gradient")]
        assert len(gradients) == count
        assert all(weight in ancestors(op) and input_ not in ancestors(op) for op in gradients)


def ancestors(op):
    found, todo = set(), [op]
    while todo:
        op = todo.pop()
        for above in [*(tensor.op for tensor in op.inputs), *op.control_inputs]:
            if above not in found:
                found.add(above)
                todo.append(above)
    return found


def reads(op):
    """The variables an op takes the value of, directly but for Identity."""
    names = set()
    for tensor in op.inputs:
        above = tensor.op
        while above.type == "Identity":
            above = above.inputs[0].op
        if above.type == "ReadVariableOp":
            names.add(above.inputs[0].name)
    return names


# -------------------------------------------------------------------------------------------------------------- stream


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves on; waking up takes `late` seconds."""

    class Clock:
        now, late = 100.0, 0.0

        def sleep(self, seconds):
            self.now += seconds + self.late

    made = Clock()
    monkeypatch.setattr(accelerator.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(accelerator.time, "sleep", made.sleep)
    return made


def test_waking_up_late_does_not_add_up(clock):
    stream, clock.late = accelerator.Stream(), 0.001
    for _ in range(100):
        stream.wait(0.01)
    assert clock.now == pytest.approx(101.001)


def test_waits_too_short_to_sleep_are_made_up_for(clock):
    stream = accelerator.Stream()
    for _ in range(1000):
        stream.wait(0.0001)
    assert 100.0995 < clock.now <= 100.1001


def test_time_in_which_nothing_was_asked_for_is_lost(clock):
    stream = accelerator.Stream()
    stream.wait(0.01)
    clock.now += 0.5
    stream.wait(0.01)
    assert clock.now == pytest.approx(100.52)


def test_a_wait_that_comes_while_another_is_under_way_ends_after_it(clock, monkeypatch):
    stream, slept = accelerator.Stream(), []
    monkeypatch.setattr(accelerator.time, "sleep", slept.append)
    stream.wait(0.01)
    stream.wait(0.02)
    assert slept == pytest.approx([0.01, 0.03])


# ----------------------------------------------------------------------------------------------------------------- fit


def trained(**options):
    keras.utils.set_random_seed(1)
    model = MODELS["mlp"].build()
    made = accelerator.waiting(model, from_flops(model, 8, 100.0))
    made.compile(keras.optimizers.Adam(0.01), MODELS["mlp"].loss(), jit_compile=False, **options)
    x, y = (np.concatenate([part] * 4) for part in data("mlp", 8, 0))
    made.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return [w.numpy() for w in made.trainable_weights]


def test_fit_gives_the_same_bits_again_also_with_several_steps_an_execution(waited):
    once = trained()
    calls_of_a_step = len(waited) / 4
    assert calls_of_a_step == 5 * 3 - 1
    again, several = trained(), trained(steps_per_execution=2)
    for a, b, c in zip(once, again, several, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
