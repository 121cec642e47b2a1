"""Runs small bodies on numpy scalars, in any order that their edges allow: what an edge does not enforce goes wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from graph_passes import ops
from graph_passes.graph import Body, split

F = np.float32


def run(body: Body, inputs: dict[str, Any], variables: dict[str, Any], seed: int) -> tuple[list[Any], list[str]]:
    """One call. inputs: of its arguments that are no variables.  variables: handle -> value, changed in place.

    The reduced gradient is twice the rank's own, as if the other rank had the same. Returns what the body returns, and
    the collectives in the order in which they ran.
    """
    rng = random.Random(seed)
    nodes = {node.name: node for node in body.graph.node}
    waiting = {name: {split(x)[0] for x in node.input} for name, node in nodes.items()}
    values: dict[tuple[str, int], Any] = {}
    reduced: list[str] = []
    left = set(nodes)
    while left:
        ready = sorted(name for name in left if not waiting[name] & left)
        assert ready, f"{sorted(left)} wait for each other"
        name = rng.choice(ready)
        left.discard(name)
        node = nodes[name]
        data = [values[split(x)] for x in node.input if not x.startswith("^")]
        for k, value in enumerate(_outputs(node, data, inputs, variables)):
            values[name, k] = value
        if ops.is_collective(node):
            reduced.append(name)
    return [values[split(tensor)] for tensor in body.ret.values()], reduced


def _outputs(node: Any, data: list[Any], inputs: dict[str, Any], variables: dict[str, Any]) -> list[Any]:
    if node.op == "Placeholder":
        return [node.name if node.attr["dtype"].type == ops.DT_RESOURCE else inputs[node.name]]
    if node.op == "VarHandleOp":
        return [node.attr["shared_name"].s.decode()]
    if node.op == "Const":
        value = node.attr["value"].tensor
        return [F(value.float_val[0]) if value.float_val else np.int64(value.int64_val[0])]
    if node.op == "ReadVariableOp":
        return [variables[data[0]]]
    if node.op in _ASSIGN:
        old = variables.get(data[0], F(0))
        variables[data[0]] = _ASSIGN[node.op](old, data[1])
        return []
    if ops.is_collective(node):
        return [F(2) * x for x in data]
    return [_PURE[node.op](*data)] if node.op != "NoOp" else []


_ASSIGN = {
    "AssignVariableOp": lambda old, new: new,
    "AssignAddVariableOp": lambda old, change: old + change,
    "AssignSubVariableOp": lambda old, change: old - change,
}
_PURE = {
    "Identity": lambda x: x,
    "AddV2": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
}
