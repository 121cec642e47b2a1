"""This project: one step function, which runs as traced, under the static plan, or under the plan of any policy.

It is profiled and planned as the product does it, by the same code, but when and as often as the coordinator says.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import horovod.tensorflow as hvd

import tf_caramel
from examples.benchmarks.programs import again, keras_fit, serve
from tf_caramel import config
from tf_caramel.planner.plan import Plan
from tf_caramel.planner.simulate import simulate
from tf_caramel.runtime import hook, probe, profiling, tuner


class Told(tuner.Tuner):
    """Runs the calls it is told to; keeps how they went."""

    def live(self) -> tuner.Life:
        self.told: deque[tuner.Call] = deque()
        self.done: list[tuner.Done] = []
        while True:
            call = self.told.popleft() if self.told else tuner.Call(self.step.arm)
            self.done.append((yield call))

    def tell(self, calls: list[tuner.Call]) -> None:
        """From the next call on."""
        self.done = []
        self.told = deque(calls[1:])
        self.step.next = calls[0]


class Caramel:
    def __init__(self, spec: dict[str, Any]) -> None:
        keras_fit.one_core(spec)
        loaded = config.load()
        installed = hook.install(loaded)
        if installed is not None:
            installed.tuner = Told
        hvd.init()
        self.spec, self.policy = spec, loaded.plan
        self.model = keras_fit.compile_(
            keras_fit.build(spec), spec, lambda opt: tf_caramel.DistributedOptimizer(opt, sparse_as_dense=True)
        )
        self.dataset = keras_fit.batches(spec)
        self.model.make_train_function()
        self.function = self.model.train_function

    def run(self, calls: int) -> serve.Clock:
        return keras_fit.fit(self.model, self.dataset, self.function, calls, self.spec.get("steps_per_execution", 1))

    def first(self) -> dict[str, Any]:
        self.run(1)
        self.step = next(iter(hook.steps()), None)
        told = self.step is not None and isinstance(self.step.tuner, Told) and self.step.life is not None
        self.told: Any = self.step.tuner if told else None
        return keras_fit.facts(self.model, self.spec) | {"why": self._why()}

    def _why(self) -> list[str]:
        """Why there is nothing to choose from."""
        if self.step is None:
            return ["the step was not rewritten: its rank's log says why"]
        return [] if self.told else list(self.step.tuner.record.why)

    def plan(self, policies: list[str]) -> dict[str, Any]:
        """Traces, measures the network, and plans by each policy and by the product's own. {"arms": ..., "why": ...}"""
        if self.told is None or not self.step.plannable:
            return {"arms": ["traced", *self.step.plans] if self.told else [], "why": list(self.step.tuner.record.why)}
        kinds = [False] * tuner.UNTRACED + [True] * self.step.config.trace_steps
        self.told.tell([tuner.Call(self.step.arm, traced) for traced in kinds])
        self.run(len(kinds))
        shown = profiling.observe(self.step, self.told.done, probe.network())
        verdict = self.step.agree("profile", shown, lambda shown: self._plans(shown, policies))
        why = list(verdict["why"])
        for name, text in verdict["plans"].items():
            problem = self.step.add(name, Plan.from_json(text))
            if problem:
                why.append(f"{name}: {problem}")
        return {"arms": ["traced", *self.step.plans], "why": why, **self._simulated()}

    def _plans(self, shown: dict[int, Any], policies: list[str]) -> dict[str, Any]:
        self.told.merged(shown)
        plans = {policy: self.told.decided(policy) for policy in policies}
        plans |= self.told.arms(self.policy, defer=True)
        why = [] if "deferred" in plans else ["deferred: at this link the plan defers nothing"]
        return {"plans": {name: plan.to_json() for name, plan in plans.items()}, "why": why}

    def _simulated(self) -> dict[str, Any]:
        """On the rank that planned: the profile, and what the simulator says of each arm."""
        profile = self.told.profile
        if profile is None:
            return {}
        bodies = {"traced": None} | {name: plan.bodies[0] for name, plan in self.step.plans.items()}
        outcomes = {name: simulate(profile, body, detail=False).step_seconds for name, body in bodies.items()}
        return {"profile": profile.to_json(), "simulated": outcomes}

    def measure(self, policy: str, steps: int, warm: int) -> dict[str, Any]:
        """The first call that defers leaves something to the next one and does nothing that was left, in the second
        TensorFlow builds the function that does both: so one more is not counted.
        """
        warm += self.told is not None and self.step.defers(policy)
        self._choose(policy, steps + warm)
        return serve.turn(self.run, steps, warm, self.spec["interface"])

    def count(self, policy: str, steps: int) -> float | None:
        self._choose(policy, 1 + steps)
        return again.messages(self.run, steps)

    def _choose(self, policy: str, calls: int) -> None:
        if self.told is not None:
            self.told.tell([tuner.Call(policy)] * calls)
        elif policy != "traced":
            raise RuntimeError(f"{policy} cannot be run: {'; '.join(self._why())}")


def make(spec: dict[str, Any]) -> dict[str, Any]:
    caramel = Caramel(spec)
    return {"init": again.init} | {name: getattr(caramel, name) for name in ("first", "plan", "measure", "count")}


if __name__ == "__main__":
    serve.serve(make)
