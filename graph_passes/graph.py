"""Function bodies as GraphDefs, and the indexed view through which passes read, rewire and verify them."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from graph_passes import ops


class GraphError(ValueError):
    """A graph breaks a rule; the text names the body and the node."""


@dataclass
class Body:
    """One function body: arguments are Placeholder nodes, `ret` and `control_ret` name what it returns.

    graph: tensorflow.GraphDef.  args: argument node names, in order.
    ret: output name -> tensor ("node" or "node:i").  control_ret: control output name -> node.
    xla: the body is compiled by XLA as a whole (passes leave it alone).
    source: what the body was made from, for whoever writes it back; passes do not look at it.
    """

    name: str
    graph: Any
    args: list[str]
    ret: dict[str, str]
    control_ret: dict[str, str]
    xla: bool = False
    changed: bool = False
    source: Any = None

    def copied(self) -> Body:
        """A copy that passes may change; what it was made from is shared."""
        return replace(self, graph=copy.deepcopy(self.graph), ret=dict(self.ret), control_ret=dict(self.control_ret))


@dataclass
class Module:
    """A top-level function and every body reachable from it, children first; the last one is the root."""

    bodies: dict[str, Body] = field(default_factory=dict)

    @property
    def root(self) -> Body:
        return next(reversed(self.bodies.values()))

    def reachable(self) -> list[Body]:
        """The bodies still reachable from the root, children first (inlined callees drop out)."""
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name in seen or name not in self.bodies:
                return
            seen.add(name)
            for node in self.bodies[name].graph.node:
                for ref in ops.function_refs(node):
                    visit(ref.name)

        visit(self.root.name)
        return [body for name, body in self.bodies.items() if name in seen]


def reached(edges: Mapping[str, Sequence[str]], names: Iterable[str]) -> set[str]:
    """What edges (`GraphView.producers` or `.consumers`) lead to from these nodes, directly or not."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        for name in edges[waiting.pop()]:
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def split(tensor: str) -> tuple[str, int]:
    """ "a:1" -> ("a", 1); "a" -> ("a", 0); "^a" -> ("a", -1)."""
    if tensor.startswith("^"):
        return tensor[1:], -1
    name, _, index = tensor.partition(":")
    return name, int(index or 0)


def join(name: str, index: int) -> str:
    if index < 0:
        return "^" + name
    return f"{name}:{index}" if index else name


class GraphView:
    """Producer and consumer index over one body. Made per pass; changes go through its methods."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.nodes: dict[str, Any] = {}
        for node in body.graph.node:
            if node.name in self.nodes:
                raise GraphError(f"{body.name}: two nodes are called {node.name}")
            self.nodes[node.name] = node

    @cached_property
    def producers(self) -> dict[str, list[str]]:
        """node -> names of the nodes it takes data or control from, in input order, without repeats."""
        return {n: list(dict.fromkeys(split(x)[0] for x in node.input)) for n, node in self.nodes.items()}

    @cached_property
    def consumers(self) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name, sources in self.producers.items():
            for source in sources:
                if source in out:
                    out[source].append(name)
        return out

    def data_inputs(self, name: str) -> list[str]:
        return [x for x in self.nodes[name].input if not x.startswith("^")]

    @cached_property
    def order(self) -> dict[str, int]:
        """node -> place in the topological order that keeps as close to the trace's order as it can.

        Raises GraphError naming the nodes of a cycle.
        """
        place = {name: i for i, name in enumerate(self.nodes)}
        back = {n for n, node in self.nodes.items() if node.op in ops.LOOP_BACK_EDGES}
        waiting = {n: sum(1 for s in sources if s not in back and s in place) for n, sources in self.producers.items()}
        ready = [place[n] for n, count in waiting.items() if not count]
        heapq.heapify(ready)
        names = list(self.nodes)
        result: dict[str, int] = {}
        while ready:
            name = names[heapq.heappop(ready)]
            result[name] = len(result)
            if name in back:
                continue
            for consumer in self.consumers[name]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(ready, place[consumer])
        if len(result) < len(names):
            stuck = sorted(set(names) - set(result))
            raise GraphError(f"{self.body.name}: cycle through {', '.join(stuck[:6])}")
        return result

    def reaches(self, found: Callable[[Any], bool]) -> dict[str, bool]:
        """node -> does any node strictly after it satisfy `found`?"""
        result: dict[str, bool] = {}
        for name in reversed(list(self.order)):
            result[name] = any(result.get(c, False) or found(self.nodes[c]) for c in self.consumers[name])
        return result

    def add(self, name: str, op: str, inputs: Iterable[str], device: str = "") -> Any:
        """Appends a node (control inputs last, as GraphDef wants) and returns it."""
        if name in self.nodes:
            raise GraphError(f"{self.body.name}: {name} exists already")
        node = self.body.graph.node.add()
        node.name, node.op, node.device = name, op, device
        items = list(inputs)
        node.input.extend([x for x in items if not x.startswith("^")])
        node.input.extend(sorted({x for x in items if x.startswith("^")}))
        self.nodes[name] = node
        self.forget()
        return node

    def add_control_input(self, name: str, source: str) -> bool:
        """Makes `name` wait for `source`; False when it already does so directly."""
        node, edge = self.nodes[name], "^" + source
        if any(split(x)[0] == source for x in node.input):
            return False
        node.input.append(edge)
        self.forget()
        return True

    def replace(self, tensors: Mapping[tuple[str, int], str], gone: Mapping[str, str]) -> None:
        """Points every reader of `tensors` at the new ones; then removes the nodes `gone`.

        gone: removed node -> node that stands for it in control edges, colocation groups and control outputs.
        """
        body = self.body

        def moved(text: str) -> str:
            name, index = split(text)
            if index < 0:
                return "^" + gone[name] if name in gone else text
            return tensors.get((name, index), text)

        touched = set(gone) | {name for name, _ in tensors}
        for node in body.graph.node:
            if any(split(x)[0] in touched for x in node.input):
                inputs = [moved(x) for x in node.input]
                del node.input[:]
                node.input.extend(x for x in inputs if not x.startswith("^"))
                node.input.extend(dict.fromkeys(x for x in inputs if x.startswith("^")))
            if "_class" in node.attr:
                places = node.attr["_class"].list.s
                for i, place in enumerate(places):
                    target = gone.get(place.decode().removeprefix("loc:@"))
                    if target:
                        places[i] = f"loc:@{target}".encode()
        body.ret.update({key: moved(tensor) for key, tensor in body.ret.items()})
        body.control_ret.update({key: gone.get(node, node) for key, node in body.control_ret.items()})
        for i in reversed([i for i, node in enumerate(body.graph.node) if node.name in gone]):
            del body.graph.node[i]
        self.nodes = {node.name: node for node in body.graph.node}
        self.forget()

    def forget(self) -> None:
        for name in ("producers", "consumers", "order"):
            self.__dict__.pop(name, None)


def verify(body: Body, outputs: Callable[[Any], int | None] | None = None) -> None:
    """Raises GraphError unless the body is a well-formed, acyclic graph whose returns exist.

    outputs: number of outputs of a node, None where unknown; without it output numbers are not checked.
    """
    view = GraphView(body)
    counts: dict[str, int | None] = {}

    def check(text: str, reader: str) -> None:
        name, index = split(text)
        if name not in view.nodes:
            raise GraphError(f"{body.name}: {reader} reads {text}, which does not exist")
        if index >= 0 and outputs is not None:
            if name not in counts:
                counts[name] = outputs(view.nodes[name])
            count = counts[name]
            if count is not None and index >= count:
                raise GraphError(f"{body.name}: {reader} reads {text}, but {name} has {count} outputs")

    for node in body.graph.node:
        control = False
        for text in node.input:
            if control and not text.startswith("^"):
                raise GraphError(f"{body.name}: {node.name} has a data input after a control input")
            control = control or text.startswith("^")
            check(text, node.name)
    for name in body.args:
        if name not in view.nodes:
            raise GraphError(f"{body.name}: argument {name} is gone")
    for key, tensor in sorted(body.ret.items()):
        check(tensor, f"output {key}")
    for key, target in sorted(body.control_ret.items()):
        if target not in view.nodes:
            raise GraphError(f"{body.name}: control output {key} names {target}, which does not exist")
    view.order  # noqa: B018  raises on a cycle
