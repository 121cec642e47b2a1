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
from graph_passes.graph import Module
from graph_passes.pass_base import Batch
from graph_passes.pass_base import Plan as BoundPlan
from tf_caramel import __version__
from tf_caramel.config import Config, load
from tf_caramel.planner.plan import Plan, Transfer, digest, first_difference
from tf_caramel.planner.static import static_plan
from tf_caramel.runtime import ranks, tf_private

log = logging.getLogger("tf_caramel")
# Read by Horovod at hvd.init(): a batch stays one message, and the names of large models stay in its cache.
HOROVOD_SETTINGS = {"HOROVOD_DISABLE_GROUP_FUSION": "1", "HOROVOD_CACHE_CAPACITY": "16384"}


class _LeaveAsTracedError(Exception):
    """All ranks leave this function alone; the text says why."""


class Hook:
    """The rewriting of one process.

    plans: digest of a signature -> the plan agreed for it.  left: steps that the ranks agreed to leave as traced.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.passes = manager.parse(config.pipeline)
        self.plans: dict[str, Plan] = {}
        self.left: set[str] = set()
        self.functions = 0
        self.warned_xla = False

    def on_graph(self, graph: Any) -> None:
        """Writes the shapes of a collective's inputs on its node, while TensorFlow still knows them."""
        if not _several_ranks():
            return
        for op in graph.get_operations():
            if op.type in ops.COLLECTIVES:
                shapes = [_shape_text(tensor.shape).encode() for tensor in op.inputs]
                value = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(s=shapes))
                op._set_attr(ops.SHAPE_ATTR, value)

    def on_function(self, concrete: Any) -> None:
        if tf_private.inside_function() or not _several_ranks():
            return
        began = time.perf_counter()
        defs = tf_private.function_defs(tf_private.function_name(concrete))
        if not any(ops.is_collective(node) for fdef in defs.values() for node in fdef.node_def):
            return
        root = next(reversed(defs.values()))
        if tf_private.MARK in root.attr or "_tf_data_function" in root.attr:
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
        if job.step in self.left:
            log.info("tf_caramel: left as traced, as was agreed when this step was traced before")
            return None
        try:
            module = tf_private.to_module(defs)
            if self._xla(module):
                return None
            statistics = manager.run(self.passes, module, job.decide, tf_private.output_count, job.observe)
            changed = any(body.changed for body in module.reachable())
            if changed:
                tf_private.swap(concrete, module)
        except (ranks.AgreementError, _LeaveAsTracedError):
            raise
        except Exception as error:
            log.debug("tf_caramel: rewriting failed", exc_info=True)
            job.failed(f"{type(error).__name__}: {error}")
        try:
            job.applied()
        except _LeaveAsTracedError:
            tf_private.restore(concrete)
            raise
        return statistics if changed else None

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

    def __init__(self, hook: Hook, step: str) -> None:
        self.hook, self.step = hook, step
        self.members = ranks.world()
        self.signature: str | None = None
        self.fresh = False  # the ranks settle this plan now, so they also tell each other whether it could be applied
        self.number = hook.functions
        hook.functions += 1

    def decide(self, module: Module) -> BoundPlan:
        bodies = [
            (body.name, [c for c in analysis.collectives(body) if c.terminal and not c.planned])
            for body in module.reachable()
        ]
        bodies = [(name, found) for name, found in bodies if found]
        if not bodies:
            return {}
        signature = {
            "versions": versions(),
            "pipeline": self.hook.config.pipeline,
            "collectives": [[c.signature() for c in found] for _, found in bodies],
        }
        self.signature = digest(signature)
        if self.signature not in self.hook.plans:
            self.members = ranks.members(int(dict(c.settings).get("process_set_id", 0)) for _, f in bodies for c in f)
            cap = next((p.cap for p in self.hook.passes if p.name == "regroup"), None)  # type: ignore[attr-defined]
            plan = static_plan([[_transfer(c) for c in found] for _, found in bodies], cap)
            verdict = self._agree("plan", {"signature": signature, "plan": plan.to_json()}, _judge_plan)
            self.fresh = True
            self.hook.plans[self.signature] = Plan.from_json(verdict["plan"])
        return self._bind(self.hook.plans[self.signature], bodies)

    def _bind(self, plan: Plan, bodies: list[tuple[str, list[analysis.Collective]]]) -> BoundPlan:
        if not any(p.name == "regroup" for p in self.hook.passes):
            return {
                name: [Batch(found[n].node, (found[n].node,)) for (n,) in batches]
                for (name, found), batches in zip(bodies, plan.batches, strict=True)
            }
        # The names say "HorovodAllreduce", so that Horovod's elastic handler knows them, and which plan they belong to.
        prefix = f"caramel_{digest([self.signature, plan.digest])}"
        bound = {}
        for place, ((name, found), batches) in enumerate(zip(bodies, plan.batches, strict=True)):
            bound[name] = [
                Batch(_batch_name(found[members[0]].op, f"{prefix}_{place}_{k}"), tuple(found[n].node for n in members))
                for k, members in enumerate(batches)
            ]
        return bound

    def failed(self, reason: str) -> NoReturn:
        """Tells the ranks that this one cannot rewrite; all leave the function as traced. Always raises."""
        stage = "applied" if self.fresh else "plan"
        if self.signature in self.hook.plans and not self.fresh:
            raise ranks.AgreementError(
                f"tf_caramel, rank {hvd.rank()}: a step that the ranks agreed to rewrite was traced again, and now "
                f"its rewriting fails here: {reason}"
            )
        self._agree(stage, {"failed": reason}, _judge_applied)
        raise _LeaveAsTracedError(reason)

    def applied(self) -> None:
        if self.fresh:
            self._agree("applied", {}, _judge_applied)

    def _agree(self, topic: str, payload: dict[str, Any], judge: ranks.Judge) -> dict[str, Any]:
        verdict = ranks.agree(topic, payload, judge, self.members, self.hook.config.timeout_seconds)
        if "leave" in verdict:
            self.hook.left.add(self.step)
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


def _step_key(defs: dict[str, Any]) -> str:
    """Stands for a step before any pass has seen it, alike on all ranks that trace the same model."""
    found = [node for fdef in defs.values() for node in fdef.node_def if ops.is_collective(node)]
    return digest(sorted([node.name.rpartition("/")[2], node.op, node.attr["T"].type] for node in found))


def _several_ranks() -> bool:
    return bool(hvd.is_initialized() and hvd.size() > 1)


def versions() -> dict[str, str]:
    return {"tf_caramel": __version__, "tensorflow": tf.__version__, "horovod": horovod.__version__}


def _judge_plan(shown: dict[int, Any]) -> dict[str, Any]:
    leave = _judge_applied(shown)
    if leave:
        return leave
    leader = min(shown)
    for rank in sorted(shown):
        difference = first_difference(shown[leader]["signature"], shown[rank]["signature"])
        if difference:
            return {"error": f"ranks {leader} and {rank} do not trace the same step. {difference}"}
    return {"plan": shown[leader]["plan"]}


def _judge_applied(shown: dict[int, Any]) -> dict[str, Any]:
    failures = [f"rank {rank}: {shown[rank]['failed']}" for rank in sorted(shown) if "failed" in shown[rank]]
    return {"leave": "; ".join(failures)} if failures else {}


def _transfer(collective: analysis.Collective) -> Transfer:
    alone = collective.op != ops.ALLREDUCE
    kind = (collective.dtype, collective.device, collective.settings)
    return Transfer(collective.bytes_, collective.ready, None if alone else kind)


def _batch_name(op: str, suffix: str) -> str:
    return f"{'HorovodAllreduce' if 'Allreduce' in op else op}_{suffix}"


def _shape_text(shape: tf.TensorShape) -> str:
    return "?" if shape.rank is None else ",".join("?" if d is None else str(d) for d in shape.as_list())


_installed: Hook | None = None
_declined = False  # why was said once


def install(config: Config) -> Hook | None:
    """Turns rewriting on for this process, once. None, with one log line, if TensorFlow does not let us."""
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
    problem = tf_private.self_test()
    if problem:
        _declined = True
        log.warning("tf_caramel: rewriting is off: the self-test fails on TensorFlow %s: %s", tf.__version__, problem)
        return None
    if not hvd.is_initialized():
        for name, value in HOROVOD_SETTINGS.items():
            os.environ.setdefault(name, value)
    elif os.environ.get("HOROVOD_DISABLE_GROUP_FUSION") != "1":
        log.warning(
            "tf_caramel: hvd.init() came before TF_CARAMEL=1 took effect, so Horovod may merge batches again: set it "
            "and import tf_caramel before hvd.init(), or set HOROVOD_DISABLE_GROUP_FUSION=1"
        )
    _installed = Hook(config)
    tf_private.add_hooks(_installed.on_graph, _installed.on_function)
    return _installed


def install_if_enabled() -> Config:
    """Reads the settings, turns rewriting on if they say so, and returns them."""
    loaded = load()
    if loaded.enabled:
        install(loaded)
    return loaded


def installed() -> bool:
    return _installed is not None


def uninstall() -> None:
    """Turns rewriting off for functions traced from now on."""
    global _installed, _declined
    _declined = False
    if _installed is not None:
        tf_private.remove_hooks(_installed.on_graph, _installed.on_function)
        _installed = None
