"""schedule: control edges between ops that compute, so that gradients become ready in the plan's order.

Which edges is the plan's decision. They cost nothing themselves; whoever decides takes care that none of them ends in
an op which TensorFlow would otherwise fuse with another (`ops.GATES`).
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.graph import GraphError, GraphView, Module
from graph_passes.pass_base import PassResult, Plan


@dataclass(frozen=True)
class Schedule:
    name = "schedule"
    summary = "make gradients ready in the plan's order"
    needs_plan = True

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        edges = 0
        for body_name, body_plan in sorted((plan or {}).items()):
            view = GraphView(module.bodies[body_name])
            before = edges
            for source, target in body_plan.edges:
                for name in (source, target):
                    if name not in view.nodes:
                        raise GraphError(f"{body_name}: the plan makes {target} wait for {source}; there is no {name}")
                edges += view.add_control_input(target, source)
            view.body.changed = view.body.changed or edges > before
        return PassResult(changed=edges > 0, statistics={"control edges": edges})
