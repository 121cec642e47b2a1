"""One rank of `policies.py`: trains a model while the plans of all policies take turns, and reports their step times.

Arguments: model, batch size, rounds, policies separated by "+" (as in TF_CARAMEL_PLAN), file for rank 0's results.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import tf_caramel
from tf_caramel.planner.calibrate import calibrate
from tf_caramel.planner.decide import decide, parse
from tf_caramel.planner.plan import Plan
from tf_caramel.planner.simulate import simulate
from tf_caramel.runtime import hook, probe, profiling, step, tuner

CALLS = 3  # in a row for each policy; the first of them is not counted


class Compare(tuner.Tuner):
    """Instead of choosing a plan and keeping it, measures all of them in turns."""

    policies: list[str]
    rounds: int
    file: Path

    def live(self) -> tuner.Life:
        yield tuner.Call(self.step.arm)
        calls = yield from self.trace()
        network = probe.network()
        verdict = self.step.agree("profile", profiling.observe(self.step, calls, network), self._all_plans)
        plans = {name: Plan.from_json(text) for name, text in verdict["plans"].items()}
        for name, plan in plans.items():
            problem = self.step.add(name, plan)
            if problem:
                raise RuntimeError(problem)
        arms = ["traced", *plans]
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(self.rounds + 1):  # the first round builds the functions
            for arm in arms:
                for k in range(CALLS):
                    done = yield tuner.Call(arm)
                    if number and k:
                        seconds[arm].append(done.seconds)
        self._report(plans, seconds)
        while True:
            yield tuner.Call("traced")

    def _all_plans(self, shown: dict[int, Any]) -> dict[str, Any]:
        seen, self.facts = profiling.merge(self.step.key, shown)
        self.profile = calibrate(seen, self.step.plans[self.step.arm].bodies[0], self.facts.step_seconds)
        plans = {text: Plan((decide(self.profile, *parse(text)),), text).to_json() for text in self.policies}
        return {"plans": plans}

    def _report(self, plans: dict[str, Plan], seconds: dict[str, list[float]]) -> None:
        if hvd.rank() or self.profile is None:
            return
        # The simulator is held to Horovod as it comes; what it says of the others is a prediction.
        rows, median = {}, {arm: statistics.median(times) for arm, times in seconds.items()}
        profile = calibrate(self.profile, None, median["traced"], tuner.SLOWEST)
        compute = profile.compute_seconds * max(profile.speeds)
        alone = profile.network.seconds(profile.bytes_)
        for arm, times in seconds.items():
            body = plans[arm].bodies[0] if arm in plans else None
            outcome = simulate(profile, body)
            m = median[arm]
            rows[arm] = {
                "seconds": times,
                "median": m,
                "predicted": outcome.step_seconds,
                "efficiency": (compute + alone - m) / min(compute, alone),
                "messages": len(outcome.messages),
                "window": body.window if body else None,
                "edges": len(body.edges) if body else None,
            }
        self.file.with_suffix(".profile.json").write_text(profile.to_json())
        network = profile.network
        self.file.write_text(
            json.dumps(
                {
                    "compute": compute,
                    "communication": alone,
                    "start_up": network.start_up_seconds,
                    "seconds_per_mb": network.seconds_per_byte * 2**20,
                    "residuals": network.residuals(),
                    "unmatched": self.facts.unmatched,
                    "step": self.facts.step_seconds,
                    "traced_step": self.facts.traced_step_seconds,
                    "observed": self.facts.messages,
                    "arms": rows,
                }
            )
        )


def main(name: str, batch: int, rounds: int, policies: list[str], file: Path) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    import keras

    from examples.benchmarks.models import MODELS, data

    def compare(*args: Any, **kwargs: Any) -> Compare:
        made = Compare(*args, **kwargs)
        made.policies, made.rounds, made.file = policies, rounds, file
        return made

    step.Tuner = compare  # type: ignore[misc,assignment]
    keras.utils.set_random_seed(1)
    model = MODELS[name].build()
    optimizer = tf_caramel.DistributedOptimizer(keras.optimizers.SGD(1e-4, momentum=0.9))
    model.compile(optimizer, MODELS[name].loss(), jit_compile=False)
    steps = 1 + tuner.UNTRACED + 5 + (rounds + 1) * CALLS * (len(policies) + 1) + 1
    x, y = (np.concatenate([part] * steps) for part in data(name, batch, hvd.rank()))
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    assert hook.usable()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split("+"), Path(sys.argv[5]))
