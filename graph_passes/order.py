"""order: control edges that fix the order in which a body's batches are handed to Horovod.

With window 1, batch k waits for the completion of batch k-1. This is the only order that TensorFlow's executor keeps
at every step: it gives no signal between "an asynchronous op was started" and "it is done". With a window of w > 1,
batch k waits for the completion of batch k-w and for the gradients of batch k-1: up to w batches are then under way
and the link does not drain, but batches that become ready at the same instant can change places.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.graph import GraphView, Module, split
from graph_passes.pass_base import PassResult, Plan


@dataclass(frozen=True)
class Order:
    """window: of the static plan."""

    window: int = 1

    name = "order"
    summary = "fix the order in which batches are submitted"
    needs_plan = True

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"order(window={self.window}): a window is at least 1")

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        edges = 0
        for body_name, body_plan in sorted((plan or {}).items()):
            view = GraphView(module.bodies[body_name])
            names = [b.name if b.name in view.nodes else b.members[0] for b in body_plan.batches]
            window, before = body_plan.window, edges
            for k, name in enumerate(names if window else []):
                if k >= window:
                    edges += view.add_control_input(name, names[k - window])
                if k and window > 1:
                    for source in (split(x)[0] for x in view.data_inputs(names[k - 1])):
                        if source not in view.body.args:  # an argument is there from the start
                            edges += view.add_control_input(name, source)
            view.body.changed = view.body.changed or edges > before
        return PassResult(changed=edges > 0, statistics={"control edges": edges})
