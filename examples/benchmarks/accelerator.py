"""The emulated accelerator: a real Keras model and a real TensorFlow graph whose layers wait instead of computing.

Training then takes the time a given accelerator would need and hardly any CPU, so that what is measured is the link and
how transfers are scheduled, not the cores of this machine. `waiting(model, times)` gives such a model; `from_flops`,
`from_file` and `Times.scaled` say how long its layers take.

What is real: the trainable weights (the very variables of the given model), their reads, gradients and updates, every
collective, and the order in which all of these may run. What is not: activations are one number an example, and the
values are made up, though deterministic and dependent on weights and data, so that a lost update shows in the weights.

A wait sleeps in one of TensorFlow's inter-op threads: it takes a thread, no core. Several may be under way at once
(three in a chain of layers, more with branches), and collectives need a thread to be enqueued, so call
`tf.config.threading.set_inter_op_parallelism_threads(8)` first.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from examples.benchmarks.layer_times import LayerTimes, Times, calls, from_file, from_flops

__all__ = ["LayerTimes", "Times", "from_file", "from_flops", "waiting"]

# An accelerator's queue hides the gap between two ops that follow each other; here that gap is Python and waking up.
HIDDEN_GAP_SECONDS = 0.002
# Shorter waits do not sleep: the queue remembers them, and the next wait is so much longer.
SHORTEST_SLEEP_SECONDS = 0.0003


class Stream:
    """One queue: waits take turns in the order in which they come, and each ends its duration after the one before."""

    def __init__(self) -> None:
        self.lock, self.free = threading.Lock(), 0.0

    def wait(self, seconds: float) -> None:
        with self.lock:
            now = time.monotonic()
            began = self.free if now < self.free + HIDDEN_GAP_SECONDS else now
            end = self.free = began + seconds
        left = end - now
        if left > SHORTEST_SLEEP_SECONDS:
            time.sleep(left)


STREAM = Stream()  # one accelerator a process


def waiting(model: Any, times: Times) -> Any:
    """A functional Keras model like `model`, with the same trainable weights, which waits instead of computing.

    Takes a built functional or Sequential model, any graph of layers; a model within the model counts as one layer.
    Inputs and outputs have the same shapes, in the order of `model.inputs` and `model.outputs`; outputs lie in 0..1.
    Trainable weights are **shared** with `model`, in the same order; others (moving statistics, frozen layers) take no
    part. All gradients are dense, also those of Embedding. A layer called n times waits for 1/n of its times at each
    call. Compile with `jit_compile=False`: a wait cannot go through XLA.

    Raises ValueError if a layer with trainable weights has no times, if there are times for a layer that does not
    exist, or if the shape of an output is not known.
    """
    graph = list(calls(model))
    _check(model, times, graph)
    often = Counter(call.layer.name for call in graph)
    made: dict[str, Waiting] = {}
    inputs = [keras.Input(tuple(t.shape)[1:], dtype=_dtype(t), name=f"input{k}") for k, t in enumerate(model.inputs)]
    values = {
        id(old): Small(name=f"small{k}")(new) for k, (old, new) in enumerate(zip(model.inputs, inputs, strict=True))
    }
    for call in graph:
        name = call.layer.name
        if name not in made:
            layer_times = times.layers.get(name, LayerTimes(0.0, 0.0, 0.0))
            made[name] = Waiting(call.weights, LayerTimes(*(t / often[name] for t in layer_times)), name=name)
        value = made[name]([values[id(tensor)] for tensor in call.inputs])
        values.update((id(tensor), value) for tensor in call.outputs)
    outputs = [
        Wide(tuple(tensor.shape)[1:], name=f"wide{k}")(values[id(tensor)]) for k, tensor in enumerate(model.outputs)
    ]
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs if len(outputs) > 1 else outputs[0])


def _check(model: Any, times: Times, graph: list[Any]) -> None:
    missing = sorted({call.layer.name for call in graph if call.weights} - set(times.layers))
    if missing:
        raise ValueError(f"{times.source}: no times for layer {missing[0]}, which has weights")
    unknown = sorted(set(times.layers) - {call.layer.name for call in graph})
    if unknown:
        raise ValueError(f"{times.source}: {model.name} has no layer {unknown[0]}")
    for tensor in model.outputs:
        if None in tuple(tensor.shape)[1:]:
            raise ValueError(f"{model.name}: the shape of an output is not known: {tuple(tensor.shape)}")


def _dtype(tensor: Any) -> str:
    return tf.as_dtype(tensor.dtype).name


class Small(keras.layers.Layer):
    """Of each example one number in -1..1: (batch, ...) to (batch, 1)."""

    def call(self, x: Any) -> Any:
        return tf.tanh(tf.cast(tf.reshape(x, (tf.shape(x)[0], -1))[:, :1], tf.float32))


class Wide(keras.layers.Layer):
    """(batch, 1) to (batch, *shape), in 0..1: whatever loss is used, it and its gradient stay finite and are not 0."""

    def __init__(self, shape: tuple[int, ...], name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.ramp = np.linspace(-1, 1, math.prod(shape), dtype="float32").reshape(shape)

    def call(self, x: Any) -> Any:
        return tf.sigmoid(tf.reshape(x, (-1, *(1,) * self.ramp.ndim)) * self.ramp)


class Waiting(keras.layers.Layer):
    """Waits `times` seconds and owns `weights`. Takes the inputs, each (batch, 1); gives (batch, 1).

    Three ops wait, as three would compute: the forward pass and the gradient of the input take the weights' values,
    like a convolution and its input gradient; the gradient of the weights takes the layer's input and dy. Without
    weights and without times the layer is no op at all.
    """

    def __init__(self, weights: list[Any], times: LayerTimes, name: str) -> None:
        super().__init__(name=name, dtype="float32")
        self.mine, self.times = weights, times
        self.supports_jit = False

    def call(self, inputs: list[Any]) -> Any:
        # The mean, not the sum: in a net of 58 concatenations sums would grow without bounds, forward and backward.
        x = inputs[0] if len(inputs) == 1 else tf.add_n(inputs) / len(inputs)
        if not self.mine and not any(self.times):
            return x
        return self._compute(x, *[tf.convert_to_tensor(weight) for weight in self.mine])

    @tf.custom_gradient
    def _compute(self, x: Any, *weights: Any) -> Any:
        def gradient(dy: Any) -> Any:
            dx = self._op("input_gradient", input_gradient, dy, *weights)
            if not weights:
                return dx
            shift = tf.reshape(self._op("weight_gradient", shift_of, x, dy), ())
            # One pass over the memory. Weights decay towards -shift, so they stay finite with any sane optimizer.
            return dx, *[tf.add(w, tf.cast(shift, w.dtype), name=f"{self.name}/gradient") for w in weights]

        return self._op("forward", forward, x, *weights), gradient

    def _op(self, kind: str, function: Callable[..., np.ndarray], *inputs: Any) -> Any:
        return wait_op(f"{self.name}/{kind}", getattr(self.times, kind), function, *inputs)


def wait_op(name: str, seconds: float, function: Callable[..., np.ndarray], *inputs: Any) -> Any:
    """An op that waits and then gives function(*inputs), (batch, 1).

    Stateless like the ops it stands for: it may run as soon as its inputs are there, and not at all if nobody wants it.
    """

    def run(*values: np.ndarray) -> np.ndarray:
        STREAM.wait(seconds)
        return function(*values)

    result = tf.numpy_function(run, inputs, tf.float32, stateful=False, name=name)
    result.set_shape((None, 1))
    return result


def level(weights: tuple[np.ndarray, ...]) -> float:
    """One number in -1..1 from one element of each tensor: cheap (no copies), and another one after an update."""
    return math.tanh(sum(weight.item(0) for weight in weights))


def forward(x: np.ndarray, *weights: np.ndarray) -> np.ndarray:
    return np.float32(0.5) * (x + np.float32(level(weights)))


def input_gradient(dy: np.ndarray, *weights: np.ndarray) -> np.ndarray:
    return dy * np.float32(1 + 1e-3 * level(weights))


def shift_of(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """(1, 1): like a gradient of the weights, a sum over the batch of the input times dy."""
    return np.tanh(np.sum(dy * (x + np.float32(1)), keepdims=True))
