"""Steps whose last updates are still pending: which function runs when, and how what is pending is applied.

All ranks run the same functions at the same calls, so they all flush at the same places. Flushing is a collective.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graph_passes import defer, loops, manager, ops
from graph_passes.graph import GraphError, Module
from graph_passes.pass_base import Plan as BoundPlan
from tf_caramel.runtime import ranks, tf_private, watchdog

log = logging.getLogger("tf_caramel")
_numbers = itertools.count()
_all: weakref.WeakSet[Pending] = weakref.WeakSet()


@dataclass(frozen=True)
class Phases:
    """What stands for an arm whose plan defers. loop: one call may be several steps.

    start: nothing is pending before it.  middle: applies what is pending first.  flush: only applies.
    stage: how far the last of them got, one of defer's values.
    """

    start: Any
    middle: Any
    flush: tf_private.Flush
    loop: bool
    stage: tf_private.HostVariable


def build(concrete: Any, module: Module, bound: Callable[[str], BoundPlan]) -> Phases:
    """From a module to which all other passes have been applied. bound: phase -> the plan for it.

    Raises GraphError if something in it cannot be deferred.
    """
    made = {}
    known = {name: defer.prospects(module, module.bodies[name]) for name in sorted(bound(defer.START))}
    for phase in (defer.START, defer.MIDDLE, defer.FLUSH):
        plan, copy = bound(phase), defer.copied(module)
        manager.run([defer.Defer(known)], copy, lambda _, plan=plan: plan, tf_private.output_count)  # type: ignore[misc]
        made[phase] = copy
    (body_name,) = plan
    path = loops.callers(module, module.bodies[body_name])
    positions = []
    for arg in made[defer.FLUSH].root.args:
        source = loops.origin(path, arg)
        position = tf_private.captured_position(concrete, module, source) if source is not None else None
        if position is None:
            raise GraphError(f"{body_name}: {arg}, which an update needs, is not a variable of the function")
        positions.append(position)
    return Phases(
        tf_private.build(concrete, made[defer.START]),
        tf_private.build(concrete, made[defer.MIDDLE]),
        tf_private.Flush(concrete, made[defer.FLUSH].root, positions),
        any(caller.node.op in ops.WHILES for caller in path),
        tf_private.HostVariable(defer.stage_name(plan[body_name]), defer.APPLIED),
    )


class Pending:
    """What a step has kept and not applied yet.

    timeout_seconds: how long applying it may take once training has failed.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.of: Phases | None = None
        self.number = next(_numbers)  # ranks make steps in the same order, and flush them in that
        self.timeout_seconds = timeout_seconds
        _all.add(self)

    def run(self, phases: Phases, args: Sequence[Any]) -> Any:
        """One call of a function whose plan defers; something is pending afterwards."""
        if self.of is not phases:
            self.flush()
        function = phases.start if self.of is None else phases.middle
        try:
            results = function.call_flat(*args)
            self.of = phases
            return results
        except BaseException:
            self._look(phases)
            raise

    def flush(self, limit_seconds: float | None = None) -> bool:
        """Applies what is pending; False if nothing is. A collective that ends with an error after `limit_seconds`."""
        if self.of is None:
            return False
        phases = self.of
        try:
            with watchdog.Watch(self.timeout_seconds, limit_seconds):
                phases.flush()
            self.of = None
        except BaseException:
            self._look(phases)
            raise
        return True

    def _look(self, phases: Phases) -> None:
        """After an error: is something pending now? What may have been applied in part is never applied again."""
        stage = phases.stage.value()
        self.of = phases if stage == defer.KEPT else None
        if stage == defer.APPLYING:
            log.error(
                "tf_caramel, rank %d: an error came while the updates of the step before were being applied; those "
                "that were not are lost, so the weights on this rank may be incomplete",
                ranks.here()[0],
            )


def flush() -> bool:
    """Applies the updates that are pending in this process. True if there were any.

    A collective: all ranks have to call it at the same place. Afterwards variables are what they would be if nothing
    had been deferred. With nothing pending it does nothing and is not a collective.
    """
    return _flush(limit=False)


def _flush(limit: bool) -> bool:
    with tf.init_scope():
        waiting = sorted(_all, key=lambda pending: pending.number)
        done = [pending.flush(pending.timeout_seconds if limit else None) for pending in waiting]
        return any(done)


def flush_after(error: BaseException) -> None:
    """`flush` on the way out of training that failed: ends within the time limit, and never hides the error."""
    try:
        _flush(limit=True)
    except Exception as problem:
        log.error(
            "tf_caramel: after %s, updates of the last step could not be applied: %s", type(error).__name__, problem
        )
