"""How long an accelerator computes in each layer of a Keras model: from FLOPs, or from a profile file.

In comes a built Keras model (functional or Sequential, Keras 2 or 3), or a JSON file; out go `Times`, in seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

ELEMENTWISE = 8  # FLOPs for each element a normalisation puts out: mean, variance, scale, shift


class LayerTimes(NamedTuple):
    """Seconds a layer takes in one step, all its calls together."""

    forward: float
    weight_gradient: float
    input_gradient: float


@dataclass(frozen=True)
class Times:
    """What each layer takes, by the layer's name; layers that are not here take no time. `source` is for errors."""

    layers: Mapping[str, LayerTimes]
    source: str = "times"

    @property
    def total(self) -> float:
        """Seconds of computing in one step, without whatever updates the weights."""
        return math.fsum(seconds for times in self.layers.values() for seconds in times)

    def scaled(self, total_seconds: float) -> Times:
        """The same proportions with another total. ValueError unless both totals are above 0."""
        if not (self.total > 0 and 0 < total_seconds < math.inf):
            raise ValueError(f"{self.source}: a total of {self.total} s cannot be scaled to {total_seconds} s")
        factor = total_seconds / self.total
        scaled = {name: LayerTimes(*(factor * s for s in times)) for name, times in self.layers.items()}
        return Times(scaled, self.source)


@dataclass(frozen=True)
class Call:
    """One call of a layer within a model: the layer (or, in Keras 3, an op that is none), its symbolic tensors."""

    layer: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    trained_behind: bool  # an input depends on trainable weights, so its gradient is needed

    @property
    def weights(self) -> list[Any]:
        return list(getattr(self.layer, "trainable_weights", ()))


def calls(model: Any) -> Iterator[Call]:
    """The calls of a built functional or Sequential model, each after those whose outputs it takes; inputs left out.

    A model within the model is one layer. Raises ValueError for a subclassed or unbuilt model: it has no graph to walk.
    """
    graph = getattr(model, "_functional", None) or model  # Keras 3's Sequential holds a functional model
    by_depth = getattr(graph, "_nodes_by_depth", None)
    if not by_depth or not model.outputs:
        raise ValueError(f"{model.name} is neither a functional nor a built Sequential model: its layers are not known")
    trained: set[int] = set()
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.is_input:
                continue
            three = hasattr(node, "operation")
            inputs = tuple(node.input_tensors if three else node.keras_inputs)
            outputs = tuple(node.output_tensors if three else tf.nest.flatten(node.outputs))
            behind = any(id(tensor) in trained for tensor in inputs)
            call = Call(node.operation if three else node.layer, inputs, outputs, behind)
            if behind or call.weights:
                trained.update(id(tensor) for tensor in outputs)
            yield call


def from_flops(model: Any, batch: int, tflops: float) -> Times:
    """Times of an accelerator that does `tflops` 1e12 floating-point operations (a multiply-add is two) a second.

    Both gradients take as long as the forward pass; a layer without trainable weights has no gradient of them, and one
    that follows no trainable weight none of its input. Layers without weights take nothing: compilers fuse them into
    the layer before. Raises ValueError for a layer with a matrix of weights whose FLOPs are not known.
    """
    if not (0 < tflops < math.inf and batch > 0):
        raise ValueError(f"batch={batch} and tflops={tflops} must be above 0")
    seconds: dict[str, LayerTimes] = {}
    for call in calls(model):
        forward = batch * _flops(call) / (tflops * 1e12)
        if forward:
            new = LayerTimes(forward, forward * bool(call.weights), forward * call.trained_behind)
            old = seconds.get(call.layer.name, LayerTimes(0.0, 0.0, 0.0))
            seconds[call.layer.name] = LayerTimes(*(a + b for a, b in zip(old, new, strict=True)))
    return Times(seconds, f"FLOPs of {model.name}")


def from_file(path: str | Path) -> Times:
    """Times from a JSON file, {"layer": {"forward": s, "weight_gradient": s, "input_gradient": s}, ...}, in seconds.

    Raises ValueError that names file, layer and field for a field that is missing, unknown, negative or not finite.
    """
    try:
        content = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path}: an object with a layer's times for each layer is expected")
    return Times({name: _checked(f"{path}: layer {name}", entry) for name, entry in content.items()}, str(path))


def _checked(where: str, entry: Any) -> LayerTimes:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: an object with {', '.join(LayerTimes._fields)} is expected")
    unknown = sorted(set(entry) - set(LayerTimes._fields))
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]}")
    for field in LayerTimes._fields:
        value = entry.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{where}: {field} is {value}, but must be a number of seconds, 0 or more")
    return LayerTimes(*(float(entry[field]) for field in LayerTimes._fields))


def _flops(call: Call) -> float:
    """FLOPs of a call's forward pass for one example."""
    layer = call.layer
    if not getattr(layer, "weights", ()):
        return 0.0
    for kinds, rule in RULES:
        if isinstance(layer, kinds):
            return rule(call)
    elements = sum(_size(tensor) for tensor in call.outputs)
    if any(math.prod(weight.shape) > elements for weight in layer.weights):
        raise ValueError(
            f"the FLOPs of layer {layer.name} ({type(layer).__name__}) are not known: take times from a file"
        )
    return ELEMENTWISE * elements  # normalisations, scales, position tables


def _size(tensor: Any, axes: slice = slice(1, None)) -> int:
    sizes = tuple(tensor.shape)[axes]
    if None in sizes:
        raise ValueError(f"the shape of {tensor.name} is not known: {tuple(tensor.shape)}")
    return math.prod(sizes)


def _matrices(layer: Any) -> int:
    return sum(math.prod(weight.shape) for weight in layer.weights if len(weight.shape) > 1)


def _positions(layer: Any, tensor: Any) -> int:
    """Elements of one example, channels not counted."""
    channels_first = getattr(layer, "data_format", None) == "channels_first"
    return _size(tensor, slice(2, None) if channels_first else slice(1, -1))


def _at_each_output(call: Call) -> float:
    return 2.0 * _matrices(call.layer) * _positions(call.layer, call.outputs[0])


def _at_each_input(call: Call) -> float:
    return 2.0 * _matrices(call.layer) * _positions(call.layer, call.inputs[0])


def _attention(call: Call) -> float:
    """Projections of queries and outputs, of keys and values, and the two products that have both."""
    queries, keys = (
        _size(tensor, slice(1, -1)) for tensor in (call.inputs[0], call.inputs[min(1, len(call.inputs) - 1)])
    )
    kernels = [weight for weight in call.layer.weights if len(weight.shape) > 2]
    flops = 4.0 * queries * keys * math.prod(kernels[0].shape[1:])  # of queries: (width, heads, size)
    for weight in kernels:
        path = str(getattr(weight, "path", weight.name))  # Keras 2 has the whole path as the name
        of_query = "/query/" in path or "/attention_output/" in path
        flops += 2.0 * math.prod(weight.shape) * (queries if of_query else keys)
    return flops


def _gathered(call: Call) -> float:
    return float(_size(call.outputs[0]))


def _nested(call: Call) -> float:
    return math.fsum(_flops(inner) for inner in calls(call.layer))


layers = keras.layers
# The first kind that fits counts: transposed convolutions are subclasses of the others in Keras 2.
RULES: tuple[tuple[tuple[type, ...], Callable[[Call], float]], ...] = (
    ((layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose, layers.RNN), _at_each_input),
    ((layers.Conv1D, layers.Conv2D, layers.Conv3D, layers.DepthwiseConv1D, layers.DepthwiseConv2D), _at_each_output),
    ((layers.SeparableConv1D, layers.SeparableConv2D, layers.Dense, layers.EinsumDense), _at_each_output),
    ((layers.MultiHeadAttention,), _attention),
    ((layers.Embedding,), _gathered),
    ((keras.Model,), _nested),
)
