"""What a planner needs to know of a body: its ops, what each waits for, and whose gradient each collective carries."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from graph_passes import ops
from graph_passes.graph import Body, GraphView, split


@dataclass(frozen=True)
class Dataflow:
    """inputs: node -> the nodes it waits for, in topological order of the nodes.
    gates: nodes that may be made to wait for another without losing a fusion.
    readers: collective -> the nodes that take its parameter for the forward and backward pass, not those that only read
    it or make it ready (cast, reshape): these may run as soon as a step begins. None where it is not clear which
    parameter that is (all updates depend on all gradients).
    """

    inputs: dict[str, list[str]]
    gates: frozenset[str]
    readers: dict[str, list[str]]


def dataflow(body: Body) -> Dataflow:
    view = GraphView(body)
    inputs = {name: [p for p in view.producers[name] if p in view.nodes] for name in view.order}
    below = view.reaches(ops.is_collective)
    return Dataflow(
        inputs=inputs,
        gates=frozenset(n for n in view.nodes if _is_gate(view, n)),
        readers=_readers(view, below),
    )


def _is_gate(view: GraphView, name: str) -> bool:
    op = view.nodes[name].op
    fused_into = ops.GATES_UNLESS_READ_BY.get(op)
    if fused_into is None:
        return op in ops.GATES
    return not any(view.nodes[reader].op in fused_into for reader in view.consumers[name])


def restarts(body: Body) -> list[str]:
    """Its seeded random ops, whose sequence begins again when the function is built anew."""
    random = [node for node in body.graph.node if node.op in ops.RANDOM]
    return sorted(n.name for n in random if any(n.attr[key].i for key in ("seed", "seed2") if key in n.attr))


def _readers(view: GraphView, below: dict[str, bool]) -> dict[str, list[str]]:
    collectives = [name for name in view.order if ops.is_collective(view.nodes[name])]
    bit = {name: 1 << k for k, name in enumerate(collectives)}
    depends: dict[str, int] = {}  # node -> the collectives it depends on, as bits
    updated: dict[str, int] = defaultdict(int)  # variable -> the collectives its updates depend on
    reads: dict[str, list[str]] = defaultdict(list)
    for name in view.order:
        mask = bit.get(name, 0)
        for source in view.producers[name]:
            mask |= depends.get(source, 0)
        depends[name] = mask
        node = view.nodes[name]
        if node.op in ops.READS and below[name]:
            reads[_handle(view, name)].append(name)
        elif ops.is_update(node) and mask:
            updated[_handle(view, name)] |= mask
    found: dict[int, list[str]] = defaultdict(list)
    for variable, mask in sorted(updated.items()):
        if variable in reads:
            found[mask].append(variable)
    result = {}
    for name in collectives:
        variables = found.get(bit[name], [])
        result[name] = _users(view, reads[variables[0]], below) if len(variables) == 1 else []
    return result


def _users(view: GraphView, reads: list[str], below: dict[str, bool]) -> list[str]:
    """Who takes what the reads give, as it is or made ready, together with something else."""
    ready = {name for name in reads if len(view.data_inputs(name)) == 1}
    found = [name for name in reads if name not in ready]  # a gather takes indices
    waiting = sorted(ready, key=view.order.__getitem__)
    for name in waiting:
        for consumer in view.consumers[name]:
            data = [split(x)[0] for x in view.data_inputs(consumer)]
            if consumer in ready or not below[consumer] or name not in data:
                continue
            if all(n in ready or view.nodes[n].op == "Const" for n in data):
                ready.add(consumer)
                waiting.append(consumer)
            else:
                found.append(consumer)
    return sorted(dict.fromkeys(found), key=view.order.__getitem__)


def _handle(view: GraphView, name: str) -> str:
    """The argument that holds the variable which a read or an update names first."""
    while True:
        data = view.data_inputs(name)
        if not data:
            return name
        name = split(data[0])[0]
