"""Who calls the body of a step, and how a loop over it begins with a turn of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from graph_passes import ops
from graph_passes.graph import Body, GraphError, GraphView, Module, join, split

_STARTING = "_starting"


@dataclass(frozen=True)
class Caller:
    """A node that runs `callee`, and the body it is in.  places: how many nodes run `callee`; this is the first."""

    body: Body
    node: Any
    callee: Body
    places: int

    def actual(self, formal: str) -> str | None:
        """The tensor in `body` that is the callee's argument `formal` at every call; None if it may change."""
        k = self.callee.args.index(formal)
        data: list[str] = [x for x in self.node.input if not x.startswith("^")]
        if self.node.op in ops.WHILES:
            return data[k] if _invariant(self.callee, k) else None
        return data[k + 1] if self.node.op in ops.IFS else data[k]


def above(module: Module, body: Body) -> Iterator[Caller]:
    """From one that runs `body` up to the root's, whatever they are. Raises GraphError for a body that nobody runs."""
    while body is not module.root:
        found = [
            (other, node)
            for other in module.reachable()
            for node in other.graph.node
            if any(ref.name == body.name for ref in ops.function_refs(node))
        ]
        if not found:
            raise GraphError(f"{body.name} is called from 0 places")
        caller, node = found[0]
        yield Caller(caller, node, body, len(found))
        body = caller


def callers(module: Module, body: Body) -> list[Caller]:
    """`above`, up to the root's. Raises GraphError if it cannot be told how often `body` runs."""
    path: list[Caller] = []
    for caller in above(module, body):
        name, node = caller.callee.name, caller.node
        if caller.places != 1:
            raise GraphError(f"{name} is called from {caller.places} places")
        if node.op in ops.IFS and not _only_checks_for_data(caller.body, node):
            raise GraphError(f"{name} runs in a branch, {node.name}")
        if node.op not in ops.CALLS | ops.IFS | ops.WHILES or (
            node.op in ops.WHILES and node.attr["cond"].func.name == name
        ):
            raise GraphError(f"{name} is called by {node.name}, which is of kind {node.op}")
        path.append(caller)
    if sum(c.node.op in ops.WHILES for c in path) > 1:
        raise GraphError(f"{path[0].callee.name} runs in a loop in a loop")
    return path


def _only_checks_for_data(body: Body, node: Any) -> bool:
    """Is the branch not taken only when the data are at their end, so that it is not taken later either?"""
    view = GraphView(body)
    waiting, seen = [split(node.input[0])[0]], set()
    while waiting:
        name = waiting.pop()
        if view.nodes[name].op == "OptionalHasValue":
            return True
        if name not in seen:
            seen.add(name)
            waiting += [split(x)[0] for x in view.data_inputs(name)]
    return False


def _invariant(body: Body, k: int) -> bool:
    """Does the body of a loop hand on its argument number k as it is?"""
    return _source(GraphView(body), list(body.ret.values())[k]) == body.args[k]


def origin(path: list[Caller], formal: str) -> str | None:
    """The root's argument that the innermost callee's argument `formal` always is; None if it is none."""
    for caller in path:
        actual = caller.actual(formal)
        if actual is None:
            return None
        formal, _ = split(_source(GraphView(caller.body), actual))
        if formal not in caller.body.args:
            return None
    return formal


def touched_outside(path: list[Caller], formal: str) -> str | None:
    """A node of a caller that touches the resource which the innermost callee has as `formal`, besides the calls."""
    for caller in path:
        actual = caller.actual(formal)
        if actual is None:
            return str(caller.node.name)
        view = GraphView(caller.body)
        source = _source(view, actual)
        for node in caller.body.graph.node:
            touches = any(_source(view, x) == source for x in view.data_inputs(node.name))
            if touches and node is not caller.node and node.op != "Identity":
                return str(node.name)
        formal, _ = split(source)
    return None


def _source(view: GraphView, tensor: str) -> str:
    name, index = split(tensor)
    while view.nodes[name].op == "Identity":
        name, index = split(view.nodes[name].input[0])
    return join(name, index)


def start_in_callers(module: Module, body: Body, starting: Body, going_on: Body) -> None:
    """Makes `module` run `starting` where `body` would run first, and `going_on` where a loop runs it again."""
    path = callers(module, body)
    loop = next((k for k, caller in enumerate(path) if caller.node.op in ops.WHILES), None)
    if loop is None:
        take(body, starting)
        return
    # Bodies between the loop and the step exist twice: as they are, and leading to `starting`.
    first = replace(starting, name=body.name + _STARTING)
    take(body, going_on)
    made = [first]
    for caller in path[:loop]:
        twin = replace(caller.body.copied(), name=caller.body.name + _STARTING, changed=True)
        node = next(n for n in twin.graph.node if n.name == caller.node.name)
        for ref in ops.function_refs(node):
            if ref.name == caller.callee.name:
                ref.name = made[-1].name
        made.append(twin)
    made.append(_same(path[loop].callee))
    _peel(path[loop], made[-2].name, made[-1].name)
    module.bodies = {b.name: b for b in made} | module.bodies


def take(body: Body, made: Body) -> None:
    """`body` is what was made of it from now on."""
    body.graph, body.ret, body.control_ret, body.changed = made.graph, made.ret, made.control_ret, True


def _same(body: Body) -> Body:
    """The body of a loop's turn that does nothing."""
    graph = type(body.graph)()
    arguments = set(body.args)
    graph.node.extend(node for node in body.graph.node if node.name in arguments)
    ret = dict(zip(body.ret, body.args, strict=True))
    return Body(f"{body.name}_not", graph, list(body.args), ret, {}, changed=True, source=body.source)


def _peel(caller: Caller, first: str, same: str) -> None:
    """The loop's first turn, if there is one, runs `first` before the loop."""
    view = GraphView(caller.body)
    loop = caller.node
    data, controls = view.data_inputs(loop.name), [x for x in loop.input if x.startswith("^")]
    test = view.add(f"{loop.name}/caramel_test", "StatefulPartitionedCall", [*data, *controls], loop.device)
    test.attr["f"].func.CopyFrom(loop.attr["cond"].func)
    test.attr["Tin"].CopyFrom(loop.attr["T"])
    test.attr["Tout"].list.type.append(ops.DT_BOOL)
    turn = view.add(f"{loop.name}/caramel_first", "If", [test.name, *data, *controls], loop.device)
    turn.attr["Tcond"].type = ops.DT_BOOL
    for key in ("Tin", "Tout"):
        turn.attr[key].CopyFrom(loop.attr["T"])
    for key in ("output_shapes", "_lower_using_switch_merge"):
        if key in loop.attr:
            turn.attr[key].CopyFrom(loop.attr[key])
    turn.attr["then_branch"].func.name, turn.attr["else_branch"].func.name = first, same
    changing = [k for k in range(len(data)) if not _invariant(caller.callee, k)]
    inputs = [join(turn.name, k) if k in changing else x for k, x in enumerate(data)]
    del loop.input[:]
    loop.input.extend([*inputs, f"^{turn.name}", *controls])
    caller.body.changed = True
