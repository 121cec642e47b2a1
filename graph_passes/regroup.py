"""regroup: the collectives of each batch become one HorovodGroupedAllreduce with a name that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graph_passes import ops
from graph_passes.graph import Body, GraphError, GraphView, Module, join
from graph_passes.pass_base import Batch, PassResult, Plan


@dataclass(frozen=True)
class Regroup:
    """cap: bytes of gradients a batch of the static plan holds at most (a larger gradient travels alone)."""

    cap: int = field(default=8 * 2**20, metadata={"unit": "bytes"})

    name = "regroup"
    summary = "merge the all-reduces of a batch into one grouped all-reduce"
    needs_plan = True

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        merged = named = 0
        for body_name, body_plan in sorted((plan or {}).items()):
            view = GraphView(module.bodies[body_name])
            tensors: dict[tuple[str, int], str] = {}
            gone: dict[str, str] = {}
            for batch in body_plan.batches:
                if batch.name in view.nodes:
                    continue  # applied before
                tensors.update(_add_batch(view, batch))
                gone.update(dict.fromkeys(batch.members, batch.name))
                merged += len(batch.members) if len(batch.members) > 1 else 0
                named += 1
            if gone:
                view.replace(tensors, gone)
                view.body.changed = True
        return PassResult(changed=named > 0, statistics={"collectives merged": merged, "batches": named})


def _add_batch(view: GraphView, batch: Batch) -> dict[tuple[str, int], str]:
    """Adds the batch's node; returns which tensor of it stands for which output of a member."""
    missing = [m for m in batch.members if m not in view.nodes]
    if missing:
        raise GraphError(f"{view.body.name}: {batch.name} names {missing[0]}, which does not exist")
    members = [view.nodes[m] for m in batch.members]
    if len(members) > 1:
        _check_alike(view.body, batch, members)
    op = ops.GROUPED_ALLREDUCE if len(members) > 1 else members[0].op
    inputs = [x for m in batch.members for x in view.data_inputs(m)]
    controls = [x for member in members for x in member.input if x.startswith("^")]
    node = view.add(batch.name, op, [*inputs, *controls], members[0].device)
    for key in members[0].attr:
        node.attr[key].CopyFrom(members[0].attr[key])
    node.attr["ignore_name_scope"].b = True
    node.attr[ops.BATCH_ATTR].list.s.extend(m.encode() for m in batch.members)
    if len(members) == 1:
        return {(batch.members[0], i): join(batch.name, i) for i in range(len(inputs))}
    node.attr["num_tensors"].i = len(members)
    shapes = [s for m in members for s in (m.attr[ops.SHAPE_ATTR].list.s or [b"?"])]
    del node.attr[ops.SHAPE_ATTR].list.s[:]
    node.attr[ops.SHAPE_ATTR].list.s.extend(shapes)
    return {(m, 0): join(batch.name, i) for i, m in enumerate(batch.members)}


def _check_alike(body: Body, batch: Batch, members: list[Any]) -> None:
    def key(node: Any) -> tuple[Any, ...]:
        settings = [node.attr[a].SerializeToString() if a in node.attr else b"" for a in ops.MESSAGE_ATTRS]
        return node.op, node.attr["T"].type, node.device, *settings

    first = members[0]
    for node in members:
        if node.op != ops.ALLREDUCE or key(node) != key(first):
            raise GraphError(
                f"{body.name}: {batch.name} cannot hold both {first.name} and {node.name}: "
                "one message has one op, dtype, device, scale and process set"
            )
