"""PyTorch's DistributedDataParallel with Gloo, on the layers of the Keras model. Another framework: for reference only.

Runs in an environment of its own, .venv-torch, which has neither TensorFlow nor Horovod.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.benchmarks.programs import serve

ACTIVATIONS: dict[Any, Callable[[Any], Any]] = {
    "relu": functional.relu, "gelu": functional.gelu, "tanh": torch.tanh, "linear": lambda x: x, None: lambda x: x,
}  # fmt: skip


class Net(nn.Module):
    """The layers as `programs.layers` describes them. Raises ValueError for a kind it does not know."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__()
        self.rows, self.output = described["layers"], described["output"]
        self.parts = nn.ModuleList(part(row) for row in self.rows)

    def forward(self, x: Any) -> Any:
        values = [x]
        for row, module in zip(self.rows, self.parts, strict=True):
            values.append(module(*[values[n] for n in row["inputs"]]))
        return values[self.output]


class Call(nn.Module):
    """A function, after a module if there is one."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *x: Any) -> Any:
        return self.function(self.module(*x)) if self.module is not None else self.function(*x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, query: Any, value: Any, key: Any | None = None) -> Any:
        return self.attention(query, value if key is None else key, value, need_weights=False)[0]


class Positions(nn.Module):
    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(*shape))

    def forward(self, x: Any) -> Any:
        return x + self.table


def part(row: dict[str, Any]) -> nn.Module:
    """A layer in PyTorch, for images with channels first."""
    kind, shape = row["kind"], row["shapes"][0]
    activation = ACTIVATIONS[row.get("activation")]
    image = len(shape) == 3
    if kind in ("Conv2D", "DepthwiseConv2D"):
        return Call(activation, _convolution(row, shape[-1]))
    if kind == "Dense":
        return Call(activation, nn.Linear(shape[-1], row["units"], row["use_bias"]))
    if kind == "BatchNormalization":
        return nn.BatchNorm2d(shape[-1], row["epsilon"]) if image else nn.BatchNorm1d(shape[-1], row["epsilon"])
    if kind == "LayerNormalization":
        return nn.LayerNorm(shape[-1], row["epsilon"])
    if kind in ("MaxPooling2D", "AveragePooling2D"):
        padding = _same(shape, row["shape"], row["pool_size"], row["strides"]) if row["padding"] == "same" else 0
        made = nn.MaxPool2d if kind == "MaxPooling2D" else nn.AvgPool2d
        return made(tuple(row["pool_size"]), tuple(row["strides"]), padding)
    if kind == "ZeroPadding2D":
        return nn.ZeroPad2d(_padding(row))
    if kind == "Embedding":
        return Call(lambda x: x, nn.Embedding(row["input_dim"], row["output_dim"]))
    if kind == "MultiHeadAttention":
        return Attention(shape[-1], row["num_heads"])
    if kind == "Positions":
        return Positions(shape)
    simple: dict[str, Callable[..., Any]] = {
        "Activation": activation,
        "ReLU": (lambda x: x.clamp(0, row["max_value"])) if row.get("max_value") else functional.relu,
        "Add": lambda *x: sum(x[1:], x[0]),
        "Concatenate": lambda *x: torch.cat(x, 1 if image else -1),
        "Flatten": lambda x: x.flatten(1),
        "GlobalAveragePooling2D": lambda x: x.mean((2, 3)),
        "Cropping1D": lambda x: x[:, : row["shape"][0]],
        "Dropout": lambda x: x,
    }
    if kind not in simple:
        raise ValueError(f"no PyTorch layer is known here for Keras's {kind}")
    return Call(simple[kind])


def _convolution(row: dict[str, Any], channels: int) -> nn.Conv2d:
    depthwise = row["kind"] == "DepthwiseConv2D"
    out = channels * row["depth_multiplier"] if depthwise else row["filters"]
    kernel, strides = tuple(row["kernel_size"]), tuple(row["strides"])
    padding = _same(row["shapes"][0], row["shape"], kernel, strides) if row["padding"] == "same" else 0
    groups = channels if depthwise else row.get("groups", 1)
    return nn.Conv2d(channels, out, kernel, strides, padding, groups=groups, bias=row["use_bias"])


def _same(shape: list[int], result: list[int], kernel: Any, strides: Any) -> tuple[int, int]:
    """The padding, alike on both sides, that makes the result at least as large as Keras's."""
    needed = [(result[i] - 1) * strides[i] + kernel[i] - shape[i] for i in range(2)]
    return max(0, math.ceil(needed[0] / 2)), max(0, math.ceil(needed[1] / 2))


def _padding(row: dict[str, Any]) -> tuple[int, int, int, int]:
    high, wide = (row["shape"][i] - row["shapes"][0][i] for i in range(2))
    return wide // 2, wide - wide // 2, high // 2, high - high // 2


class Ddp:
    def __init__(self, spec: dict[str, Any]) -> None:
        if spec["accelerator"]:
            raise ValueError("PyTorch has no emulated accelerator here")
        torch.set_num_threads(1)
        torch.manual_seed(1)
        os.environ["GLOO_SOCKET_IFNAME"] = spec["interface"]
        address, count = spec["addresses"][0], len(spec["addresses"])
        dist.init_process_group("gloo", f"tcp://{address}:{spec['port']}", rank=spec["rank"], world_size=count)
        self.spec, described = spec, spec["layers"]
        shape = [spec["batch"], *described["input"]]
        tokens = [row["input_dim"] for row in described["layers"] if row["kind"] == "Embedding"]
        if tokens:
            self.x = torch.randint(0, tokens[0], shape)
        else:
            self.x = torch.rand([shape[0], shape[3], *shape[1:3]] if len(shape) == 4 else shape)
        self.y = torch.randint(0, 10, (shape[0],))
        self.net: Any = DistributedDataParallel(Net(described))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4, momentum=0.9)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(self.net(self.x), self.y).backward()
        self.optimizer.step()

    def run(self, calls: int) -> serve.Clock:
        clock = serve.Clock(self.step)
        for _ in range(calls):
            clock()
        return clock

    def first(self) -> dict[str, Any]:
        self.run(1)
        return {"gradient_bytes": sum(p.numel() * p.element_size() for p in self.net.parameters())}

    def measure(self, steps: int, warm: int) -> dict[str, Any]:
        return serve.turn(self.run, steps, warm, self.spec["interface"])


def make(spec: dict[str, Any]) -> dict[str, Any]:
    ddp = Ddp(spec)
    return {"first": ddp.first, "measure": ddp.measure}


if __name__ == "__main__":
    serve.serve(make)
