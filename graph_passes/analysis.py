"""What collectives a body holds, when each becomes ready, and what each would send. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from graph_passes import ops
from graph_passes.graph import Body, GraphView, Module, split


@dataclass(frozen=True)
class Collective:
    """One collective of a body.

    key: the node's name after the last "/": what stays the same when a rank's graph has other scopes around it.
    shapes: of its inputs, None where the trace did not know them.  bytes_: their sum, None if one is unknown.
    ready: place of its last producer in the body's topological order.
    terminal: no other collective depends on it (so it may share a message without delaying one).
    planned: it already carries a plan's name.
    """

    node: str
    key: str
    op: str
    dtype: str
    shapes: tuple[str | None, ...]
    bytes_: int | None
    settings: tuple[tuple[str, float], ...]
    device: str
    ready: int
    terminal: bool
    planned: bool

    def signature(self) -> dict[str, Any]:
        """What must be equal on every rank, as plain data."""
        # The first dimension of an all-gather is each rank's own.
        shapes = [s if "gather" not in self.op or s is None else s.partition(",")[2] for s in self.shapes]
        return {
            "key": self.key,
            "op": self.op,
            "dtype": self.dtype,
            "shapes": shapes,
            "settings": dict(self.settings),
            "device": self.device,
        }


def collectives(body: Body) -> list[Collective]:
    """The body's collectives in the order in which they were traced."""
    if not any(ops.is_collective(node) for node in body.graph.node):
        return []
    view = GraphView(body)
    below = view.reaches(ops.is_collective)
    return [_describe(view, node, terminal=not below[node.name]) for node in body.graph.node if ops.is_collective(node)]


def _describe(view: GraphView, node: Any, terminal: bool) -> Collective:
    inputs = [split(x) for x in view.data_inputs(node.name)]
    # A call gives all its results at once; the last of them belong to the last layers, whose gradients come first.
    last = max(inputs, key=lambda x: (view.order[x[0]], -x[1]))
    dtype = node.attr["T"].type
    shapes = tuple(_shapes(node, len(inputs)))
    sizes = [_elements(shape) for shape in shapes]
    return Collective(
        node=node.name,
        key=node.name.rpartition("/")[2],
        op=node.op,
        dtype=ops.DTYPE_NAMES.get(dtype, str(dtype)),
        shapes=shapes,
        bytes_=None if None in sizes else sum(s for s in sizes if s is not None) * ops.DTYPE_BYTES.get(dtype, 4),
        settings=tuple((a, _number(node.attr[a])) for a in ops.MESSAGE_ATTRS if a in node.attr),
        device=node.device,
        ready=view.order[last[0]] * 100_000 - last[1],
        terminal=terminal,
        planned=ops.BATCH_ATTR in node.attr,
    )


def _number(attr: Any) -> float:
    return float(attr.i if attr.WhichOneof("value") == "i" else round(attr.f, 9))


def _shapes(node: Any, count: int) -> list[str | None]:
    if ops.SHAPE_ATTR not in node.attr:
        return [None] * count
    return [s.decode() if s != b"?" else None for s in node.attr[ops.SHAPE_ATTR].list.s]


def _elements(shape: str | None) -> int | None:
    """Elements of a shape written "3,4"; "" is a scalar; None if a dimension is unknown ("?")."""
    if shape is None or "?" in shape:
        return None
    return prod(int(d) for d in shape.split(",") if d)


def leads_to_collective(module: Module) -> Mapping[str, bool]:
    """body name -> does it, or any body it refers to, hold a collective?"""
    found: dict[str, bool] = {}
    for name, body in module.bodies.items():  # children first
        found[name] = any(
            ops.is_collective(node) or any(found.get(ref.name, False) for ref in ops.function_refs(node))
            for node in body.graph.node
        )
    return found
