"""chunk: a large gradient travels in slices, each an all-reduce of its own, which are joined again behind it.

Slices are cut along the first dimension of a view whose rows are whole cache lines, where TensorFlow shares the memory
instead of copying; joining them copies once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from graph_passes import ops
from graph_passes.graph import GraphError, GraphView, Module, join
from graph_passes.pass_base import PassResult, Plan

_ROWS = (
    64,
    16,
    1,
)  # elements of a row, the largest that divides the gradient: 64 bytes or more of any dtype, if it can


@dataclass(frozen=True)
class Chunk:
    name = "chunk"
    summary = "cut large gradients into slices that travel one by one"
    needs_plan = True

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        cut = slices = 0
        for body_name, body_plan in sorted((plan or {}).items()):
            view = GraphView(module.bodies[body_name])
            for collective, parts in sorted(body_plan.chunks.items()):
                if collective in view.nodes:  # else it was cut before
                    _cut(view, collective, parts)
                    view.body.changed = True
                    cut, slices = cut + 1, slices + parts
        return PassResult(changed=cut > 0, statistics={"gradients cut": cut, "slices": slices})


def slice_name(collective: str, part: int, parts: int) -> str:
    """The node that reduces the `part`-th of `parts` slices."""
    return f"{collective}_part{part}of{parts}"


def _cut(view: GraphView, name: str, parts: int) -> None:
    node = view.nodes[name]
    shape = _shape(view, node)
    elements = prod(shape)
    if not 2 <= parts <= elements:
        raise GraphError(f"{view.body.name}: {name} has {elements} elements and cannot be cut into {parts} slices")
    row = next(r for r in _ROWS if elements % r == 0 and elements // r >= parts)
    rows = elements // row
    sizes = [rows * (i + 1) // parts - rows * i // parts for i in range(parts)]

    def constant(label: str, values: Sequence[int], scalar: bool = False) -> str:
        made = view.add(f"{name}_{label}", "Const", [], node.device)
        made.attr["dtype"].type = ops.DT_INT32
        tensor = made.attr["value"].tensor
        tensor.dtype = ops.DT_INT32
        tensor.int_val.extend(values)
        if not scalar:
            tensor.tensor_shape.dim.add().size = len(values)
        else:
            tensor.tensor_shape.SetInParent()
        return str(made.name)

    def reshape(label: str, tensor: str, sizes: Sequence[int]) -> str:
        made = view.add(f"{name}_{label}", "Reshape", [tensor, constant(f"{label}_shape", sizes)], node.device)
        made.attr["T"].type, made.attr["Tshape"].type = node.attr["T"].type, ops.DT_INT32
        return str(made.name)

    (gradient,) = view.data_inputs(name)
    controls = [x for x in node.input if x.startswith("^")]
    axis = constant("axis", [0], scalar=True)
    split = view.add(
        f"{name}_split",
        "SplitV",
        [reshape("rows", gradient, [rows, row]), constant("sizes", sizes), axis],
        node.device,
    )
    split.attr["T"].type, split.attr["Tlen"].type, split.attr["num_split"].i = (
        node.attr["T"].type,
        ops.DT_INT32,
        parts,
    )
    made = []
    for part, size in enumerate(sizes):
        piece = view.add(slice_name(name, part, parts), node.op, [join(split.name, part), *controls], node.device)
        for key in node.attr:
            piece.attr[key].CopyFrom(node.attr[key])
        piece.attr[ops.SHAPE_ATTR].list.s[:] = [f"{size},{row}".encode()]
        made.append(str(piece.name))
    joined = view.add(f"{name}_join", "ConcatV2", [*made, axis], node.device)
    joined.attr["T"].type, joined.attr["Tidx"].type, joined.attr["N"].i = node.attr["T"].type, ops.DT_INT32, parts
    whole = reshape("whole", joined.name, shape)
    view.replace({(name, 0): whole}, {name: whole})


def _shape(view: GraphView, node: Any) -> list[int]:
    shapes = node.attr[ops.SHAPE_ATTR].list.s if ops.SHAPE_ATTR in node.attr else []
    if node.op != ops.ALLREDUCE or len(shapes) != 1 or b"?" in shapes[0]:
        raise GraphError(f"{view.body.name}: {node.name} is not an all-reduce of one tensor of known shape")
    return [int(d) for d in shapes[0].decode().split(",") if d]
