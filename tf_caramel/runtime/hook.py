"""Rewrites every new top-level tf.function that holds Horovod collectives: passes, a plan all ranks share, a swap.

Whatever fails on one rank leaves the function as traced on every rank, with one log line; what the ranks disagree
about is an error on every rank.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf
from google.protobuf import text_format

from graph_passes import analysis, manager, ops
from graph_passes.dataflow import restarts
from graph_passes.graph import Module
from graph_passes.pass_base import Plan as BoundPlan
from tf_caramel import __version__
from tf_caramel.config import Config, load
from tf_caramel.planner.plan import Plan, check, digest, first_difference
from tf_caramel.planner.profile import InputError
from tf_caramel.planner.static import Traced, static_plan
from tf_caramel.runtime import probe, ranks, tf_private
from tf_caramel.runtime.cache import Cache
from tf_caramel.runtime.priority import Priority
from tf_caramel.runtime.step import Collectives, Step, bind, collectives, judge_failures
from tf_caramel.runtime.tuner import Tuner

log = logging.getLogger("tf_caramel")
# Read by Horovod at hvd.init(): the names of large models stay in its cache. Not HOROVOD_DISABLE_GROUP_FUSION: it turns
# all of Horovod's fusion off, also for functions that run as traced, and where batches wait for each other there is
# never another one to be merged with.
HOROVOD_SETTINGS = {"HOROVOD_CACHE_CAPACITY": "16384"}
_SET_UP = ("THRESHOLD", "TIME", "CONTROLLER", "OPERATIONS", "IFACE", "FUSION", "ALLREDUCE")  # ends of names that matter


class _LeaveAsTracedError(Exception):
    """All ranks leave this function alone; the text says why."""


class Hook:
    """The rewriting of one process.

    steps: digest of a signature -> the step that the ranks agreed on.  left: those they agreed to leave as traced.
    tuner: leads the life of each step; benchmarks put their own.  priority: of Horovod's threads, for all steps.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tuner: type[Tuner] = Tuner
        self.passes = manager.parse(config.pipeline)
        self.priority = Priority(config.priority == "auto")
        self.steps: dict[str, Step] = {}
        self.left: set[str] = set()
        self.functions = 0
        self.warned_xla = False

    def on_graph(self, graph: Any) -> None:
        """Writes shapes on nodes, while TensorFlow still knows them: of collectives' inputs, and what is a scalar."""
        if not _several_ranks():
            return
        for op in graph.get_operations():
            if op.type in ops.COLLECTIVES:
                shapes = [_shape_text(tensor.shape).encode() for tensor in op.inputs]
                value = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(s=shapes))
                op._set_attr(ops.SHAPE_ATTR, value)
            elif op.outputs and all(t.shape.rank == 0 and t.dtype.is_floating for t in op.outputs):
                op._set_attr(ops.SCALAR_ATTR, tf.compat.v1.AttrValue(b=True))

    def on_function(self, concrete: Any) -> None:
        if tf_private.inside_function() or not _several_ranks():
            return
        began = time.perf_counter()
        defs = tf_private.function_defs(tf_private.function_name(concrete))
        found = [node for fdef in defs.values() for node in fdef.node_def if ops.is_collective(node)]
        if not found or any(ops.PROBE in node.name for node in found):
            return
        root = next(reversed(defs.values()))
        if tf_private.MARK in root.attr or "_tf_data_function" in root.attr or not usable():
            return
        try:
            done = self._rewrite(concrete, defs)
            if done is not None:
                took = time.perf_counter() - began
                log.info("tf_caramel: %s rewritten in %.2f s: %s", root.signature.name, took, done)
        except ranks.AgreementError:
            raise
        except _LeaveAsTracedError as reason:
            log.warning("tf_caramel: %s is left as traced: %s", root.signature.name, reason)

    def _rewrite(self, concrete: Any, defs: dict[str, Any]) -> dict[str, dict[str, int]] | None:
        """Rewrites the function and returns each pass's statistics; None if there was nothing to change."""
        job = _Job(self, _step_key(defs))
        if job.step_key in self.left:
            log.info("tf_caramel: left as traced, as was agreed when this step was traced before")
            return None
        statistics, atomic = {}, None
        try:
            module = tf_private.to_module(defs)
            if self._xla(module):
                return None
            statistics = manager.run(self.passes, module, job.decide, tf_private.output_count, job.observe)
            if any(body.changed for body in module.reachable()):
                atomic = job.build(concrete, module)
        except (ranks.AgreementError, _LeaveAsTracedError):
            raise
        except Exception as error:
            log.debug("tf_caramel: rewriting failed", exc_info=True)
            job.failed(f"{type(error).__name__}: {error}")
        return statistics if job.applied(concrete, atomic) else None

    def _xla(self, module: Module) -> bool:
        leads = analysis.leads_to_collective(module)
        names = [body.name for body in module.bodies.values() if body.xla and leads[body.name]]
        if names and not self.warned_xla:
            self.warned_xla = True
            log.warning(
                "tf_caramel: %s is compiled by XLA (jit_compile=True) and left alone; Horovod's collectives have no "
                "XLA kernels, so TensorFlow will refuse to run it: pass jit_compile=False to compile() or tf.function",
                names[-1],
            )
        return bool(names)


class _Job:
    """One function on its way through the passes and the ranks' agreement."""

    def __init__(self, hook: Hook, step_key: str) -> None:
        self.hook, self.step_key = hook, step_key
        self.members = ranks.world()
        self.step: Step | None = None
        self.bodies: list[Collectives] = []
        self.fresh = False  # the ranks settle this plan now, so they also tell each other whether it could be applied
        self.number = hook.functions
        hook.functions += 1

    def decide(self, module: Module) -> BoundPlan:
        bodies = self.bodies = [found for body in module.reachable() if (found := collectives(body))]
        if not bodies:
            return {}
        signature = {
            "versions": versions(),
            "settings": self.hook.config.shared(),
            "collectives": [[c.signature() for c in body.found] for body in bodies],
        }
        key = digest(signature)
        if key not in self.hook.steps:
            sets = {int(dict(c.settings).get("process_set_id", 0)) for body in bodies for c in body.found}
            self.members = ranks.members(sets)
            self._settle(key, signature, module, bodies, sets)
        self.step = self.hook.steps[key]
        plan = self.step.plans.get(self.step.arm)
        return bind(plan, bodies, key) if plan is not None else {}

    def build(self, concrete: Any, module: Module) -> Any:
        plan = self.step.plans.get(self.step.arm) if self.step is not None else None
        if self.step is None or plan is None:
            return tf_private.build(concrete, module)
        return self.step.finish(concrete, module, plan, self.bodies)

    def _settle(
        self, key: str, signature: dict[str, Any], module: Module, bodies: list[Collectives], sets: set[int]
    ) -> None:
        """The ranks agree on the step's first plan."""
        config = self.hook.config
        mine = {
            "signature": signature,
            **_obstacles(config, module, bodies, sets, len(self.members)),
            "first": self._first(module, bodies) if hvd.rank() == min(self.members) else None,
        }
        first = self._agree("plan", mine, _judge_plan)
        self.fresh = True
        fixed, unplannable = first["fixed"], first["unplannable"]
        arm, plan = first["arm"], Plan.from_json(first["plan"]) if first["plan"] else None
        if first["restarts"]:
            arm, plan = "traced", None
        self.hook.steps[key] = Step(
            config,
            self.hook.passes,
            first["key"],
            key,
            self.members,
            {arm: plan} if plan is not None else {},
            arm,
            first["reference"],
            why := [*first["why"], *first["restarts"], *fixed, *unplannable],
            plannable=not unplannable,
            priority=self.hook.priority,
            tuner=self.hook.tuner,
        )
        if config.measures and not fixed and not first["restarts"]:
            self.hook.steps[key].measure()
        for reason in why:
            log.info("tf_caramel: %s", reason)

    def _first(self, module: Module, bodies: list[Collectives]) -> dict[str, Any]:
        """The plan to begin with, as one rank sees it: from a file, from the cache, or the static one."""
        config = self.hook.config
        key = _cache_key(module, bodies, config, len(self.members))
        kinds = [body.kinds for body in bodies]
        first: dict[str, Any] = {"key": key, "arm": "static", "reference": None, "why": []}
        try:
            if config.plan.endswith(".json"):
                plan = Plan.from_json(Path(config.plan).read_text(), config.plan)
                check(plan, kinds, config.plan)
                return first | {"arm": "measured", "plan": plan.to_json()}
            kept = Cache(config.cache).load(key) if config.measures else None
            if kept is not None:
                plan, record = kept
                if plan is not None:
                    check(plan, kinds, str(Cache(config.cache).entry(key)))
                plan_text = plan.to_json() if plan is not None else None
                return first | {"arm": record.chosen, "plan": plan_text, "reference": record.median(record.chosen)}
        except (InputError, OSError) as error:
            log.warning("tf_caramel: the static plan is used: %s", error)
            first["why"] = [f"the static plan was used: {error}"]
        regroup = next((p for p in self.hook.passes if p.name == "regroup"), None)
        order = next((p for p in self.hook.passes if p.name == "order"), None)
        traced = [[Traced(n, b.bytes_[n], b.ready[n], b.kinds[n]) for n in b.nodes] for b in bodies]
        plan = static_plan(traced, regroup.cap if regroup else None, order.window if order else 0)  # type: ignore[attr-defined]
        return first | {"plan": plan.to_json()}

    def failed(self, reason: str) -> NoReturn:
        """Tells the ranks that this one cannot rewrite; all leave the function as traced. Always raises."""
        if self.step is not None and not self.fresh:
            raise ranks.AgreementError(
                f"tf_caramel, rank {hvd.rank()}: a step that the ranks agreed to rewrite was traced again, and now "
                f"its rewriting fails here: {reason}"
            )
        self._agree("applied" if self.fresh else "plan", {"failed": reason}, judge_failures)
        raise _LeaveAsTracedError(reason)

    def applied(self, concrete: Any, atomic: Any) -> bool:
        """All ranks are done: the function runs what was built. True if that is not what was traced."""
        if self.fresh:
            self._agree("applied", {}, judge_failures)
        if self.step is None:
            return False
        try:
            self.step.adopt(concrete, atomic)
        except Exception as error:
            self.failed(f"{type(error).__name__}: {error}")
        return atomic is not None

    def _agree(self, topic: str, payload: dict[str, Any], judge: ranks.Judge) -> dict[str, Any]:
        verdict = ranks.agree(topic, payload, judge, self.members, self.hook.config.timeout_seconds)
        if "leave" in verdict:
            self.hook.left.add(self.step_key)
            if self.step is not None:
                self.step.leave(verdict["leave"])
            raise _LeaveAsTracedError(verdict["leave"])
        return verdict

    def observe(self, label: str, module: Module) -> None:
        if self.hook.config.dump:
            leads = analysis.leads_to_collective(module)
            for body in module.reachable():
                if leads[body.name]:
                    folder = Path(self.hook.config.dump) / f"rank{hvd.rank()}" / f"{self.number:02d}_{body.name}"
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{label}.pbtxt").write_text(text_format.MessageToString(body.graph))


def _obstacles(
    config: Config, module: Module, bodies: list[Collectives], sets: set[int], ranks_: int
) -> dict[str, list[str]]:
    """unplannable: why no measured plan can be made for this step.  fixed: why nothing may replace its first plan.
    restarts: why two ways of running it cannot be compared, so that it is left as traced.
    """
    found: dict[str, list[str]] = {"unplannable": [], "fixed": [], "restarts": []}
    if not config.measures:
        return found
    if len(bodies) > 1:
        names = ", ".join(b.body.name for b in bodies)
        found["unplannable"].append(f"no measured plan: the collectives are in {len(bodies)} function bodies ({names})")
    if sets != {0}:
        found["unplannable"].append("no measured plan: the collectives are of a process set")
    if ranks_ > 2 and tf_private.deterministic():
        found["fixed"].append(
            "the first plan stays: op determinism is asked for, and another plan sums three or more ranks in another "
            "order"
        )
    random = [name for body in module.reachable() for name in restarts(body)]
    if random:
        found["restarts"].append(
            f"left as traced: {random[0]} is a seeded random op, whose sequence would begin again if the function were "
            "built anew, so nothing can be compared"
        )
    return found


def _cache_key(module: Module, bodies: list[Collectives], config: Config, ranks_: int) -> str:
    """Stands for the graph and the set-up that a profile is good for."""
    graph = sorted(f"{node.op} {node.name}" for body in module.reachable() for node in body.graph.node)
    horovod = {k: v for k, v in os.environ.items() if k.startswith("HOROVOD_") and k.rpartition("_")[2] in _SET_UP}
    hosts = [hvd.local_size(), hvd.cross_size()]
    signature = [[c.signature() for c in body.found] for body in bodies]
    return digest([versions(), config.shared(), graph, signature, ranks_, hosts, horovod, probe.cores()])


def _step_key(defs: dict[str, Any]) -> str:
    """Stands for a step before any pass has seen it, alike on all ranks that trace the same model."""
    found = [node for fdef in defs.values() for node in fdef.node_def if ops.is_collective(node)]
    return digest(sorted([node.name.rpartition("/")[2], node.op, node.attr["T"].type] for node in found))


def _several_ranks() -> bool:
    return bool(hvd.is_initialized() and hvd.size() > 1)


def versions() -> dict[str, str]:
    return {"tf_caramel": __version__, "tensorflow": tf.__version__, "horovod": horovod.__version__}


def _judge_plan(shown: dict[int, Any]) -> dict[str, Any]:
    leave = judge_failures(shown)
    if leave:
        return leave
    leader = min(shown)
    for rank in sorted(shown):
        difference = first_difference(shown[leader]["signature"], shown[rank]["signature"])
        if difference:
            return {"error": f"ranks {leader} and {rank} do not trace the same step. {difference}"}
    return shown[leader]["first"] | {
        name: list(dict.fromkeys(reason for rank in sorted(shown) for reason in shown[rank][name]))
        for name in ("fixed", "unplannable", "restarts")
    }


def _shape_text(shape: tf.TensorShape) -> str:
    return "?" if shape.rank is None else ",".join("?" if d is None else str(d) for d in shape.as_list())


_installed: Hook | None = None
_declined = False  # why was said once
_tested = False


def install(config: Config) -> Hook | None:
    """Turns rewriting on for this process, once. Does not start TensorFlow: the user may want to configure it first."""
    global _installed, _declined
    if _declined:
        return None
    if _installed is not None:
        if _installed.config != config:
            raise RuntimeError(f"tf_caramel is on with {_installed.config}; it cannot be changed to {config}")
        return _installed
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        _declined = True
        log.warning("tf_caramel: rewriting is off: HOROVOD_ELASTIC=1, the number of ranks may change")
        return None
    if not hvd.is_initialized():
        for name, value in HOROVOD_SETTINGS.items():
            os.environ.setdefault(name, value)
    _installed = Hook(config)
    tf_private.add_hooks(_installed.on_graph, _installed.on_function)
    return _installed


def install_if_enabled() -> Config:
    """Reads the settings, turns rewriting on if they say so, and returns them."""
    loaded = load()
    if loaded.enabled:
        install(loaded)
    return loaded


def usable() -> bool:
    """Is rewriting on, and does it work with this TensorFlow? The first time something is traced, a self-test says so;
    if it fails, rewriting is off from then on, with one log line."""
    global _tested, _declined
    if _installed is not None and not _tested:
        _tested = True
        problem = tf_private.self_test()
        if problem:
            uninstall()
            _declined = True
            text = "tf_caramel: rewriting is off: the self-test fails on TensorFlow %s: %s"
            log.warning(text, tf.__version__, problem)
    return _installed is not None


def steps() -> list[Step]:
    """The steps that this process has rewritten, in the order in which they were traced."""
    return list(_installed.steps.values()) if _installed is not None else []


def uninstall() -> None:
    """Turns rewriting off for functions traced from now on."""
    global _installed, _declined, _tested
    _declined = _tested = False
    if _installed is not None:
        tf_private.remove_hooks(_installed.on_graph, _installed.on_function)
        _installed = None
