"""inline: brings collectives up into the body that computes their gradients, out of calls and constant branches.

Control edges cannot cross function boundaries, so this comes first. The meaning of a call is kept: its control
inputs gate its arguments and its input-less nodes, and whoever waits for the call waits for all of the callee.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graph_passes import ops
from graph_passes.analysis import leads_to_collective
from graph_passes.graph import Body, GraphView, Module, join, split
from graph_passes.pass_base import PassResult, Plan


@dataclass(frozen=True)
class Inline:
    name = "inline"
    summary = "bring collectives up into the body that computes their gradients"
    needs_plan = False

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        leads = leads_to_collective(module)
        inlined = 0
        for body in module.bodies.values():  # children first: a callee is settled before its caller takes it in
            if leads[body.name] and not body.xla:
                calls = {node.name: callee for node, callee in _calls(body, module, leads)}
                for name, (callee, skip) in calls.items():
                    _inline_call(body, name, callee, skip)
                inlined += len(calls)
                body.changed = body.changed or bool(calls)
        return PassResult(changed=inlined > 0, statistics={"calls inlined": inlined})


def _calls(body: Body, module: Module, leads: Mapping[str, bool]) -> list[tuple[Any, tuple[Body, int]]]:
    """The calls to take in: (node, (callee, number of inputs before the arguments))."""
    nodes = {node.name: node for node in body.graph.node}
    out = []
    for node in body.graph.node:
        name, skip = "", 0
        if node.op in ops.CALLS and not ops.is_xla(node.attr):
            name = node.attr["f"].func.name
        elif node.op in ops.IFS:
            predicate = _constant_bool(nodes, node.input[0])
            if predicate is not None:
                name, skip = node.attr["then_branch" if predicate else "else_branch"].func.name, 1
        callee = module.bodies.get(name)
        if callee is not None and leads[name] and not callee.xla and not _self_contained(callee):
            out.append((node, (callee, skip)))
    return out


def _self_contained(body: Body) -> bool:
    """True when every gradient is computed in this body and every reduced value is used up in it."""
    view = GraphView(body)
    found = [node.name for node in body.graph.node if ops.is_collective(node)]
    if not found:
        return True  # its collectives sit deeper, in a body that owns them
    for name in found:
        for text in view.data_inputs(name):
            source = split(text)[0]
            while view.nodes[source].op in ops.PASS_THROUGH and view.data_inputs(source):
                source = split(view.data_inputs(source)[0])[0]
            if source in body.args:
                return False
    returned = {split(tensor)[0] for tensor in body.ret.values()}
    while returned:
        if returned & set(found):
            return False
        returned = {
            split(x)[0]
            for name in returned
            if view.nodes[name].op in ops.PASS_THROUGH
            for x in view.data_inputs(name)[:1]
        }
    return True


def _constant_bool(nodes: Mapping[str, Any], tensor: str) -> bool | None:
    node = nodes[split(tensor)[0]]
    while node.op == "Identity":
        node = nodes[split(node.input[0])[0]]
    if node.op != "Const" or ops.DTYPE_NAMES.get(node.attr["dtype"].type) != "bool":
        return None
    value = node.attr["value"].tensor
    return any(value.bool_val) or any(value.tensor_content)


def _waits(view: GraphView, tensor: str) -> bool:
    """Does a constant predicate, or an Identity it comes through, have control inputs?"""
    node = view.nodes[split(tensor)[0]]
    controlled = any(x.startswith("^") for x in node.input)
    return controlled or (node.op == "Identity" and _waits(view, node.input[0]))


def _inline_call(body: Body, call_name: str, callee: Body, skip: int) -> None:
    view = GraphView(body)
    call = view.nodes[call_name]
    prefix = call_name + "/"
    while any(prefix + node.name in view.nodes for node in callee.graph.node):
        prefix = prefix[:-1] + "_/"
    formals = set(callee.args)
    taken = {*view.nodes, *(prefix + node.name for node in callee.graph.node)}
    gates = [x for x in call.input if x.startswith("^")]
    if skip and _waits(view, call.input[0]):
        gates.append("^" + split(call.input[0])[0])
    if gates:
        gate = view.add(_free(taken, prefix + "input_control"), "NoOp", gates, call.device).name
        gates = ["^" + gate]
    actual: dict[str, str] = {}
    types = {node.name: node.attr["dtype"] for node in callee.graph.node if node.name in formals}
    for formal, tensor in zip(callee.args, view.data_inputs(call_name)[skip:], strict=True):
        actual[formal] = tensor
        if gates:
            identity = view.add(_free(taken, f"{prefix}{formal}_in"), "Identity", [tensor, *gates], call.device)
            identity.attr["T"].CopyFrom(types[formal])
            actual[formal] = identity.name
    inner = {node.name: prefix + node.name for node in callee.graph.node if node.name not in formals}

    def moved(text: str) -> str:
        name, index = split(text)
        if name in actual:
            return "^" + split(actual[name])[0] if index < 0 else actual[name]
        return join(inner[name], index)

    for node in callee.graph.node:
        if node.name not in inner:
            continue
        copy = view.body.graph.node.add()
        copy.CopyFrom(node)
        copy.name = inner[node.name]
        del copy.input[:]
        copy.input.extend([moved(x) for x in node.input] or gates)
        copy.device = node.device or call.device
        if "_class" in copy.attr:
            places = copy.attr["_class"].list.s
            for i, place in enumerate(places):
                target = place.decode().removeprefix("loc:@")
                if target in actual:
                    places[i] = f"loc:@{split(actual[target])[0]}".encode()
                elif target in inner:
                    places[i] = f"loc:@{inner[target]}".encode()
    view = GraphView(body)
    done = [*(f"^{inner.get(n, n)}" for n in sorted(set(callee.control_ret.values())) if n in inner), *gates]
    outputs = {(call_name, i): moved(tensor) for i, tensor in enumerate(callee.ret.values())}
    done += ["^" + split(tensor)[0] for tensor in outputs.values()]
    end = view.add(_free(taken, prefix + "output_control"), "NoOp", done, call.device)
    view.replace(outputs, {call_name: end.name})
    needed = bool(view.consumers[end.name]) or end.name in body.control_ret.values()
    if not needed:  # then only colocation groups can name it, and they may as well name a result
        results = [split(tensor)[0] for tensor in outputs.values()]
        view.replace({}, {end.name: next(iter([*results, *inner.values()]), end.name)})


def _free(taken: set[str], name: str) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
