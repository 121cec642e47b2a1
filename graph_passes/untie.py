"""untie: each update waits for its own gradient, not for all of them.

Keras hands all gradients through one IdentityN (tf.distribute's replica context does so, also without a strategy),
which runs when the last of them is there, so that no update can begin while others still travel. Its readers are
pointed at what it passes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes import ops
from graph_passes.graph import GraphView, Module, split
from graph_passes.pass_base import PassResult, Plan


@dataclass(frozen=True)
class Untie:
    name = "untie"
    summary = "let each update wait for its own gradient only"
    needs_plan = False

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        untied = 0
        for body in module.bodies.values():
            ties = [n.name for n in body.graph.node if n.op == "IdentityN" and not any("^" in x for x in n.input)]
            if not ties or not any(ops.is_collective(node) for node in body.graph.node):
                continue
            view = GraphView(body)
            after = set(_after_collectives(view))
            for name in ties:
                if name in after and _readers(view, name):
                    given = view.data_inputs(name)
                    view.replace({(name, i): tensor for i, tensor in enumerate(given)}, {})
                    if not view.consumers[name] and name not in body.control_ret.values():
                        view.replace({}, {name: split(given[0])[0]})
                    body.changed = True
                    untied += 1
        return PassResult(changed=untied > 0, statistics={"ties": untied})


def _after_collectives(view: GraphView) -> list[str]:
    found: dict[str, None] = {}
    for name in view.order:
        if any(p in found or ops.is_collective(view.nodes[p]) for p in view.producers[name] if p in view.nodes):
            found[name] = None
    return list(found)


def _readers(view: GraphView, name: str) -> bool:
    """Does anybody read its data?"""
    data = [x for n in view.consumers[name] for x in view.data_inputs(n)] + list(view.body.ret.values())
    return any(x.partition(":")[0] == name for x in data)
