"""A step: all traced functions with the same collectives, the plans they can run under (arms), and which one does.

An arm is called "traced" (as TensorFlow traced the function), "static" (the plan made without times), "measured",
"deferred" (measured, with updates in the next step) or "loose" (deferred, the rest left to Horovod's fusion).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from graph_passes import analysis, chunk, manager, ops
from graph_passes.defer import WHOLE, prospects
from graph_passes.deferral import Followers
from graph_passes.graph import Body, Module
from graph_passes.inline import Inline
from graph_passes.loops import above
from graph_passes.pass_base import Batch
from graph_passes.pass_base import BodyPlan as BoundBody
from graph_passes.pass_base import Plan as BoundPlan
from graph_passes.untie import Untie
from tf_caramel.config import Config
from tf_caramel.planner.plan import Plan, digest
from tf_caramel.planner.record import Record
from tf_caramel.runtime import deferral, fitting, ranks, tf_private, watchdog
from tf_caramel.runtime.cache import Cache
from tf_caramel.runtime.priority import Priority
from tf_caramel.runtime.tuner import Call, Done, Tuner

log = logging.getLogger("tf_caramel")


@dataclass(frozen=True)
class Collectives:
    """The collectives of one body that a plan is made for, by the names that plans use.

    nodes: name -> node.  bytes_: None where unknown.  kinds: None: travels alone and whole.  ops: of the nodes.
    ready: any number that orders.  tied: as traced, who waits for one of them waits for all.
    undeferrable: name -> why its update cannot run in the next step.  looped: one call may be several steps.
    """

    body: Body
    nodes: Mapping[str, str]
    bytes_: Mapping[str, int | None]
    kinds: Mapping[str, str | None]
    ops: Mapping[str, str]
    ready: Mapping[str, int]
    found: tuple[analysis.Collective, ...]
    tied: bool = False
    undeferrable: Mapping[str, str] = field(default_factory=dict)
    looped: bool = False

    @property
    def keys(self) -> list[str]:
        return [c.key for c in self.found]


def collectives(body: Body) -> Collectives | None:
    """None if the body holds none that can be planned."""
    found = tuple(c for c in analysis.collectives(body) if c.terminal and not c.planned)
    if not found:
        return None
    named: dict[str, analysis.Collective] = {}
    copies: Counter[str] = Counter()
    for c in found:
        copies[c.key] += 1
        named[c.key if copies[c.key] == 1 else f"{c.key}#{copies[c.key]}"] = c
    return Collectives(
        body,
        {name: c.node for name, c in named.items()},
        {name: c.bytes_ for name, c in named.items()},
        {name: _kind(c) for name, c in named.items()},
        {name: c.op for name, c in named.items()},
        {name: c.ready for name, c in named.items()},
        found,
    )


def _kind(c: analysis.Collective) -> str | None:
    if c.op != ops.ALLREDUCE or c.bytes_ is None:
        return None
    return " ".join([c.dtype, *(f"{key}={value:g}" for key, value in c.settings), c.device]).strip()


def bind(plan: Plan, bodies: list[Collectives], signature: str, phase: str = WHOLE) -> BoundPlan:
    """The plan in names of the nodes of one function. Raises InputError if it does not fit."""
    # The names say "HorovodAllreduce", so that Horovod's elastic handler knows them, and which plan they belong to.
    prefix = f"caramel_{digest([signature, plan.digest])}"
    bound = {}
    for place, (found, body) in enumerate(zip(bodies, plan.bodies, strict=True)):
        batches, chunks = [], {}
        for k, pieces in enumerate(body.batches):
            op = found.ops[pieces[0].transfer]
            name = f"{'HorovodAllreduce' if 'Allreduce' in op else op}_{prefix}_{place}_{k}"
            members = []
            for piece in pieces:
                node = found.nodes[piece.transfer]
                if piece.parts > 1:
                    chunks[node] = piece.parts
                    node = chunk.slice_name(node, piece.part, piece.parts)
                members.append(node)
            batches.append(Batch(name, tuple(members)))
        bound[found.body.name] = BoundBody(batches, body.window, body.edges, chunks, body.deferred, phase)
    return bound


class Function:
    """One traced function of a step. arms: name -> what runs."""

    def __init__(self, concrete: Any) -> None:
        self.concrete = weakref.ref(concrete)
        self.arms: dict[str, Any] = {"traced": tf_private.original(concrete)}
        self.dispatch: Any = None

    def module(self) -> Module:
        return tf_private.to_module(tf_private.function_defs(tf_private.name_of(self.arms["traced"])))

    def collectives(self) -> Collectives:
        """Of the one body that holds them, as it is when plans are applied to it."""
        module = self.module()
        done = manager.run([Inline(), Untie()], module, lambda _: {}, tf_private.output_count)
        (found,) = [c for body in module.reachable() if (c := collectives(body))]
        why = {one.collective: one.obstacle or _rounded(found.body, one) for one in prospects(module, found.body)}
        undeferrable = {name: reason for name, node in found.nodes.items() if (reason := why[node])}
        looped = any(caller.node.op in ops.WHILES for caller in above(module, found.body))
        return replace(found, tied=done["untie"]["ties"] > 0, undeferrable=undeferrable, looped=looped)


def _rounded(body: Body, one: Followers) -> str | None:
    """Why an update may round differently when it is deferred: TensorFlow 2.15 turns x / sqrt(y) into x * rsqrt(y) in
    one function and not in another (seen with Keras 2's Adagrad)."""
    if tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 16):
        return None
    nodes = {node.name: node for node in body.graph.node}
    for name in one.moved:
        divisor = nodes[name].input[1].partition(":")[0] if nodes[name].op == "RealDiv" else ""
        if divisor and nodes[divisor].op == "Sqrt":
            return f"{name} divides by a square root, which this TensorFlow rounds in two ways"
    return None


class Step:
    """key: of the step and the set-up.  signature: what its ranks agreed on, as a digest.
    plans: arm -> its plan ("traced" has none).  arm: which one runs.  plannable: a measured plan can be made for it.
    kept: it began with what an earlier run had found.  priority: of Horovod's threads.
    pending: what is deferred.  fallback: the arm that runs where `arm` defers and deferring is not allowed.
    remarks: what else the report has to say.
    """

    def __init__(
        self,
        config: Config,
        passes: list[Any],
        key: str,
        signature: str,
        members: tuple[int, ...],
        plans: dict[str, Plan],
        arm: str,
        reference: float | None,
        why: list[str],
        plannable: bool,
        priority: Priority,
        tuner: type[Tuner] = Tuner,
    ) -> None:
        self.plannable, self.kept, self.priority = plannable, reference is not None, priority
        self.config, self.passes, self.key, self.signature, self.members = config, passes, key, signature, members
        self.plans, self.arm = plans, arm
        self.functions: list[Function] = []
        self.pending = deferral.Pending(config.timeout_seconds)
        self.fallback = "traced"
        self.label = ""
        self.remarks: list[str] = []
        self.tuner = tuner(self, reference, record=Record(key, "", len(members), config.plan, arm, why=tuple(why)))
        self.life: Any = None
        self.next: Call | None = None

    @property
    def plain(self) -> str:
        """The arm that runs, or the one in its place where deferring is not allowed."""
        return self.fallback if self.defers(self.arm) else self.arm

    def may_defer(self, looped: bool) -> bool:
        """May updates be pending between two of the next steps? looped: one call may be several steps."""
        return fitting.across(self) or self._within(looped)

    def _within(self, looped: bool) -> bool:
        return looped and self.config.defer in ("auto", "within")

    def measure(self) -> None:
        """From the next call on, calls are counted and measured."""
        self.life = self.tuner.live()
        self.next = next(self.life)

    # What the tuner asks of it

    def runs(self, plan: Plan) -> bool:
        """Is that what runs already?"""
        return self.arm in self.plans and self.plans[self.arm].bodies == plan.bodies

    def defers(self, arm: str) -> bool:
        return arm in self.plans and any(body.deferred for body in self.plans[arm].bodies)

    def messages(self) -> dict[str, int]:
        """Of the plain arm: last part of a collective's name -> bytes."""
        function = next(f for f in self.functions if f.concrete() is not None)
        found = function.collectives()
        if self.plain == "traced":
            return {c.key: c.bytes_ or 0 for c in found.found}
        plan = self.plans[self.plain]
        bound = bind(plan, [found], self.signature)[found.body.name]
        return {
            batch.name: sum(piece.bytes_of(found.bytes_[piece.transfer] or 0) for piece in pieces)
            for batch, pieces in zip(bound.batches, plan.bodies[0].batches, strict=True)
        }

    def agree(self, topic: str, payload: Any, judge: ranks.Judge) -> dict[str, Any]:
        return ranks.agree(f"{topic}.{self.signature}", payload, judge, self.members, self.config.timeout_seconds)

    def add(self, arm: str, plan: Plan) -> str | None:
        """Builds every function for the plan, on all ranks or on none. Says why not, if not."""
        problem = None
        built: list[tuple[Function, Any]] = []
        try:
            for function in self.functions:
                concrete = function.concrete()
                if concrete is not None:
                    built.append((function, self._build(concrete, function, plan)))
        except Exception as error:  # the other ranks have to be told
            log.debug("tf_caramel: building a plan failed", exc_info=True)
            problem = {"failed": f"{type(error).__name__}: {error}"}
        verdict = self.agree("built", problem or {}, judge_failures)
        if "leave" in verdict:
            return f"the measured plan cannot be built: {verdict['leave']}"
        self.plans[arm] = plan
        for function, atomic in built:
            function.arms[arm] = atomic
        return None

    def settle(self, arm: str, fallback: str) -> None:
        """That arm runs from now on; those that are not needed again go. fallback: does not defer."""
        self.arm, self.fallback = arm, fallback
        for function in self.functions:
            function.arms = {name: f for name, f in function.arms.items() if name in (arm, fallback, "traced")}
            if function.dispatch is not None:
                function.dispatch.arm = function.arms[self.plain]
        self.plans = {name: plan for name, plan in self.plans.items() if name in (arm, fallback)}

    def save(self) -> None:
        """One rank keeps what was measured."""
        if hvd.rank() == min(self.members) and self.tuner.profile is not None:
            self.write(Cache(self.config.cache))

    def write(self, cache: Cache) -> None:
        plan = self.plans.get(self.arm) or self.tuner.planned  # what was judged is worth a look, also if it lost
        why = tuple(dict.fromkeys((*self.tuner.record.why, *self.remarks)))
        cache.save(self.key, self.tuner.profile, plan, replace(self.tuner.record, function=self.label, why=why))

    def leave(self, reason: str) -> None:
        """Its functions stay as traced, on all ranks."""
        self.arm, self.plans = "traced", {}
        self.life = self.next = None
        self.tuner.record = replace(self.tuner.record, chosen="traced")
        self.remarks.append(f"left as traced: {reason}")

    def remark(self, text: str) -> None:
        """For the report and the log, once."""
        if text not in self.remarks:
            self.remarks.append(text)
            log.info("tf_caramel: %s: %s", self.label, text)

    # Functions

    def adopt(self, concrete: Any, atomic: Any) -> None:
        """A function traced just now; `atomic`: built for the arm that runs (None: it runs as traced)."""
        function = Function(concrete)
        self.label = self.label or tf_private.name_of(function.arms["traced"])
        if atomic is not None:
            function.arms[self.arm] = atomic
        for arm, plan in self.plans.items():
            if arm not in function.arms:
                function.arms[arm] = self._build(concrete, function, plan)
        self.functions = [f for f in self.functions if f.concrete() is not None] + [function]
        if self.life is None and not self.defers(self.arm):
            tf_private.swap(concrete, function.arms[self.arm])
        else:
            function.dispatch = tf_private.dispatch(concrete, function.arms[self.plain], self._around(function))

    def _build(self, concrete: Any, function: Function, plan: Plan) -> Any:
        module = function.module()
        bodies: list[Collectives] = []

        def bound(module: Module) -> BoundPlan:
            bodies.extend(c for body in module.reachable() if (c := collectives(body)))
            return bind(plan, bodies, self.signature)

        manager.run(self.passes, module, bound, tf_private.output_count)
        return self.finish(concrete, module, plan, bodies)

    def finish(self, concrete: Any, module: Module, plan: Plan, bodies: list[Collectives]) -> Any:
        """What runs in place of `concrete`, of a module to which the plan has been applied."""
        if any(body.deferred for body in plan.bodies):
            return deferral.build(concrete, module, lambda phase: bind(plan, bodies, self.signature, phase))
        return tf_private.build(concrete, module)

    def _around(self, function: Function) -> Callable[[Any, tuple[Any, ...]], Any]:
        def around(_: Any, args: tuple[Any, ...]) -> Any:
            with watchdog.Watch(self.config.timeout_seconds):
                return counted(args)

        def counted(args: tuple[Any, ...]) -> Any:
            call = self.next
            if call is None:
                return self._run(function, self.arm, args)[0]
            tracing, trace = self._start_tracing() if call.traced else (None, None)
            began, cpu = time.perf_counter(), time.process_time()
            try:
                results, arm, steady = self._run(function, call.arm, args)
                seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            finally:
                if tracing is not None:
                    trace = tracing.stop()
            self._advance(Done(function, arm, steady, seconds, cpu, trace))
            return results

        return around

    def _run(self, function: Function, arm: str, args: tuple[Any, ...]) -> tuple[Any, str, bool]:
        """The results, which arm ran (deferring is not always allowed), and whether it ran as it always will."""
        runs = function.arms[arm]
        if isinstance(runs, deferral.Phases):
            across = fitting.across(self)
            if across or self._within(runs.loop):
                self._let_first(arm)
                steady = runs.loop or self.pending.of is runs
                return self._deferred(runs, args, across), arm, steady
            arm = self.fallback
            runs = function.arms[arm]
        self.pending.flush()
        self._let_first(arm)
        return runs.call_flat(*args), arm, True

    def _let_first(self, arm: str) -> None:
        """Horovod's threads go first for plans that are held to the function as traced, where they do not."""
        self.priority.let(arm != "traced" and self.life is not None)
        if self.priority.obstacle:
            self.remark(self.priority.obstacle)

    def _deferred(self, runs: deferral.Phases, args: tuple[Any, ...], across: bool) -> Any:
        try:
            results = self.pending.run(runs, args)
        except BaseException as error:
            if not across:
                deferral.flush_after(error)
            raise
        if not across:
            self.pending.flush()
        return results

    @staticmethod
    def _start_tracing() -> tuple[Any, str | None]:
        try:
            tracing = tf_private.Tracing()
            tracing.start()
        except Exception as error:  # the user's own profiler runs, or TensorFlow has changed
            return None, f"TensorFlow's tracer does not start: {error}"
        return tracing, None

    def _advance(self, done: Done) -> None:
        call, self.next = self.next, None  # a call from inside, or one after an error, is not counted
        try:
            self.next = self.life.send(done)
        except ranks.AgreementError:
            raise
        except Exception as error:
            log.warning("tf_caramel: %s is not measured any more: %s: %s", self.label, type(error).__name__, error)
            log.debug("tf_caramel: while after %s", call, exc_info=True)


def judge_failures(shown: dict[int, Any]) -> dict[str, Any]:
    failures = [f"rank {rank}: {shown[rank]['failed']}" for rank in sorted(shown) if "failed" in shown[rank]]
    return {"leave": "; ".join(failures)} if failures else {}
