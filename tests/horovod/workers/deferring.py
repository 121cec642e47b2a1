"""For workers that defer: every step's first plan is the static one with its last gradients deferred, or the same plan
undeferred, as `plans.deferred` says when the step is traced. With LOOSE=1 what is not deferred is left to Horovod."""

import logging
import os
from dataclasses import replace

from tf_caramel.planner.decide import loosened
from tf_caramel.planner.plan import Plan
from tf_caramel.runtime import hook


class plans:  # noqa: N801  a namespace
    deferred = True


class Lines(logging.Handler):
    lines: list[str] = []  # noqa: RUF012

    def emit(self, record):
        self.lines.append(record.getMessage())


logging.getLogger("tf_caramel").addHandler(Lines())
logging.getLogger("tf_caramel").setLevel(logging.INFO)
_static = hook.static_plan


def _plan(*arguments):
    plan = _static(*arguments)
    bodies = []
    for body in plan.bodies:
        pieces = [piece for batch in body.batches for piece in batch]
        late = tuple(reversed(pieces[len(pieces) // 2 :]))  # first used first
        batches = (late[:1], late[1:], tuple(pieces[: len(pieces) // 2]))
        body = replace(body, batches=batches, window=1, deferred=2 * plans.deferred)
        bodies.append(loosened(body) if plans.deferred and "LOOSE" in os.environ else body)
    return Plan(tuple(bodies), "test")


hook.static_plan = _plan
