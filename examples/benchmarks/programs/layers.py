"""A Keras model as plain data: which layers, of which shapes, fed by which. For a program of another framework."""

from __future__ import annotations

from typing import Any

from examples.benchmarks.layer_times import calls

_KEPT = (
    "filters", "units", "kernel_size", "strides", "padding", "pool_size", "depth_multiplier", "groups", "activation",
    "use_bias", "axis", "epsilon", "input_dim", "output_dim", "num_heads", "key_dim", "max_value",
)  # fmt: skip


def described(model: Any) -> dict[str, Any]:
    """inputs: shape of one example.  layers: in an order in which they can be run; `inputs` are numbers of values, the
    model's input is 0 and layer n, counted from 1, makes value n.  output: the value that is the model's.
    """
    numbers = {id(tensor): 0 for tensor in model.inputs}
    rows: list[dict[str, Any]] = []
    for call in calls(model):
        config = call.layer.get_config() if hasattr(call.layer, "get_config") else {}
        rows.append(
            {
                "kind": type(call.layer).__name__,
                "inputs": [numbers[id(tensor)] for tensor in call.inputs],
                "shapes": [list(tensor.shape)[1:] for tensor in call.inputs],
                "shape": list(call.outputs[0].shape)[1:],
                **{key: value for key, value in config.items() if key in _KEPT and _plain(value)},
            }
        )
        numbers.update((id(tensor), len(rows)) for tensor in call.outputs)
    return {"input": list(model.inputs[0].shape)[1:], "layers": rows, "output": numbers[id(model.outputs[0])]}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, str | int | float | bool)
