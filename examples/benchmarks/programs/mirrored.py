"""tf.distribute's MultiWorkerMirroredStrategy with ring collectives, as it comes or with a bytes_per_pack.

Not under `fit`: with Keras 3.15 that fails on a strategy of several workers, first where it builds the model, then
where it gathers the logs. The train step is Keras's own, in a loop as the strategy's guide has it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from examples.benchmarks.programs import keras_fit, serve

MIB = 2**20
_OPTIONS = tf.distribute.experimental.CommunicationOptions
_RING = tf.distribute.experimental.CommunicationImplementation.RING


class Mirrored:
    """functions: MB of a pack (0: as it comes) -> one step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        workers = [f"{address}:{spec['port'] + rank}" for rank, address in enumerate(spec["addresses"])]
        task = {"type": "worker", "index": spec["rank"]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        keras_fit.one_core(spec)
        self.spec = spec
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=_OPTIONS(implementation=_RING))
        with self.strategy.scope():
            self.model = keras_fit.compile_(keras_fit.build(spec), spec)
            self.model.optimizer.build(self.model.trainable_variables)
        # The strategy deals a batch out to the workers.
        batches = keras_fit.batches(spec, copies=len(workers))
        self.iterator = iter(self.strategy.experimental_distribute_dataset(batches))
        self.functions: dict[int, Callable[[], Any]] = {}

    def function(self, pack_mb: int) -> Callable[[], Any]:
        if pack_mb not in self.functions:
            # Read when a function is traced; a strategy of its own for each would be a process of its own.
            self.strategy.extended._communication_options = _OPTIONS(pack_mb * MIB, implementation=_RING)

            @tf.function(autograph=False)
            def step(iterator: Any) -> Any:
                return self.strategy.run(self.model.train_step, args=(next(iterator),))

            self.functions[pack_mb] = lambda: step(self.iterator)
            self.functions[pack_mb]()  # traced now, not in a turn that is measured
        return self.functions[pack_mb]

    def first(self) -> dict[str, Any]:
        self.function(0)
        return keras_fit.facts(self.model, self.spec)

    def measure(self, pack_mb: int, steps: int, warm: int) -> dict[str, Any]:
        function = self.function(pack_mb)

        def run(calls: int) -> serve.Clock:
            clock = serve.Clock(function)
            for _ in range(calls):
                clock()
            return clock

        return serve.turn(run, steps, warm, self.spec["interface"])


def make(spec: dict[str, Any]) -> dict[str, Any]:
    mirrored = Mirrored(spec)
    return {name: getattr(mirrored, name) for name in ("first", "measure")}


if __name__ == "__main__":
    serve.serve(make)
