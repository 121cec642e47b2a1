"""Small bodies in a few lines, and their comparison: two graphs are equal when their nodes are, in whatever order.

A signature "x y -> a b:1 ^w" reads: arguments x and y, outputs a and b:1, control output w ("^w=v": w names v).
"""

from __future__ import annotations

import difflib
from typing import Any

from google.protobuf import text_format
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, tensor_pb2, types_pb2

from graph_passes import ops
from graph_passes.graph import Body, Module, join, split, verify
from graph_passes.pass_base import PassResult


def _attr(value: Any) -> Any:
    """A str is a type if it begins with DT_, else a function's name; a list holds texts."""
    if isinstance(value, bool):
        return attr_value_pb2.AttrValue(b=value)
    if isinstance(value, int):
        return attr_value_pb2.AttrValue(i=value)
    if isinstance(value, float):
        return attr_value_pb2.AttrValue(f=value)
    if isinstance(value, str) and value.startswith("DT_"):
        return attr_value_pb2.AttrValue(type=types_pb2.DataType.Value(value))
    if isinstance(value, str):
        return attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name=value))
    if isinstance(value, list):
        return attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(s=[x.encode() for x in value]))
    return attr_value_pb2.AttrValue(tensor=value)


def node(name: str, op: str, inputs: str = "", device: str = "", **attrs: Any) -> Any:
    values = {key: _attr(value) for key, value in attrs.items()}
    return node_def_pb2.NodeDef(name=name, op=op, input=inputs.split(), device=device, attr=values)


def identity(name: str, inputs: str) -> Any:
    return node(name, "Identity", inputs, T="DT_FLOAT")


def constant(name: str, inputs: str = "", **tensor: Any) -> Any:
    """A scalar bool: constant("p", bool_val=[True])."""
    value = tensor_pb2.TensorProto(dtype=types_pb2.DT_BOOL, **tensor)
    return node(name, "Const", inputs, dtype="DT_BOOL", value=value)


def call(name: str, callee: str, inputs: str, device: str = "", **attrs: Any) -> Any:
    return node(name, "PartitionedCall", inputs, device, f=callee, **attrs)


def branch(name: str, then: str, otherwise: str, inputs: str) -> Any:
    return node(name, "StatelessIf", inputs, then_branch=then, else_branch=otherwise)


def allreduce(name: str, inputs: str, shape: str = "?", device: str = "", **changes: Any) -> Any:
    """An all-reduce as Horovod traces it; of several inputs, a grouped one. shape: of its inputs, joined by ";"."""
    attrs = {
        "T": "DT_FLOAT", "reduce_op": 1, "prescale_factor": 1.0, "postscale_factor": 1.0, "process_set_id": 0,
        "ignore_name_scope": False, ops.SHAPE_ATTR: shape.split(";"),
    }  # fmt: skip
    count = sum(not x.startswith("^") for x in inputs.split())
    if count > 1:
        attrs["num_tensors"] = count
    op = ops.GROUPED_ALLREDUCE if count > 1 else ops.ALLREDUCE
    return node(name, op, inputs, device, **(attrs | changes))


def batch(name: str, members: str, inputs: str, shape: str = "?", **changes: Any) -> Any:
    """What regroup makes of `members`."""
    return allreduce(name, inputs, shape, ignore_name_scope=True, **{ops.BATCH_ATTR: members.split()}, **changes)


def body(name: str, signature: str, *nodes: Any, xla: bool = False, resources: str = "") -> Body:
    """resources: those of the arguments that are variables."""
    left, _, right = signature.partition("->")
    returned = right.split()
    controls = [x[1:].partition("=") for x in returned if x.startswith("^")]
    dtypes = {x: "DT_RESOURCE" if x in resources.split() else "DT_FLOAT" for x in left.split()}
    arguments = [node(x, "Placeholder", dtype=dtypes[x]) for x in left.split()]
    return Body(
        name,
        graph_pb2.GraphDef(node=[*arguments, *nodes]),
        left.split(),
        {f"out{i}": x for i, x in enumerate(x for x in returned if not x.startswith("^"))},
        {key: target or key for key, _, target in controls},
        xla,
    )


def module(*bodies: Body) -> Module:
    """Children first, the root last."""
    return Module({b.name: b for b in bodies})


def apply(one: Any, *bodies: Body, plan: Any = None) -> PassResult:
    result: PassResult = one.run(module(*bodies), plan)
    for changed in bodies:
        verify(changed)
    return result


def show(shown: Body) -> list[str]:
    """The signature, then a line for each node, sorted by name: all there is to a body but the order of its nodes."""
    lines = []
    for n in sorted(shown.graph.node, key=lambda n: n.name):
        data = [join(*split(x)) for x in n.input if not x.startswith("^")]
        inputs = " ".join(data + sorted(x for x in n.input if x.startswith("^")))
        attrs = [f"{k}={text_format.MessageToString(n.attr[k], as_one_line=True)}" for k in sorted(n.attr)]
        lines.append(f"{n.name} = {n.op}({inputs}) @{n.device} {', '.join(attrs)}")
    ret = [f"{key}={join(*split(tensor))}" for key, tensor in shown.ret.items()]
    controls = [f"^{key}={target}" for key, target in sorted(shown.control_ret.items())]
    return [" ".join([*shown.args, "->", *ret, *controls]), *lines]


def expect(actual: Body, signature: str, *nodes: Any) -> None:
    """Fails, showing the lines that differ, unless `actual` is the body that the rest describes."""
    __tracebackhide__ = True
    got, wanted = show(actual), show(body(actual.name, signature, *nodes))
    if got != wanted:
        diff = difflib.unified_diff(wanted, got, "expected", "got", lineterm="")
        raise AssertionError(f"{actual.name} is not the expected graph:\n" + "\n".join(diff))
