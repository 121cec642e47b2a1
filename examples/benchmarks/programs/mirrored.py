"""tf.distribute's MultiWorkerMirroredStrategy with ring collectives, under `fit`, with any bytes_per_pack."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

from examples.benchmarks.programs import keras_fit, serve

MIB = 2**20
_OPTIONS = tf.distribute.experimental.CommunicationOptions
_RING = tf.distribute.experimental.CommunicationImplementation.RING


class Mirrored:
    """functions: MB of a pack (0: as it comes) -> train function."""

    def __init__(self, spec: dict[str, Any]) -> None:
        workers = [f"{address}:{spec['port'] + rank}" for rank, address in enumerate(spec["addresses"])]
        task = {"type": "worker", "index": spec["rank"]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        keras_fit.one_core(spec)
        self.spec = spec
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=_OPTIONS(implementation=_RING))
        with self.strategy.scope():
            self.model = keras_fit.compile_(keras_fit.build(spec), spec)
        # The strategy deals a batch out to the workers.
        self.dataset = keras_fit.batches(spec, copies=len(workers))
        self.functions: dict[int, Any] = {}

    def function(self, pack_mb: int) -> Any:
        if pack_mb not in self.functions:
            # Read when a function is traced; a strategy of its own for each would be a process of its own.
            self.strategy.extended._communication_options = _OPTIONS(pack_mb * MIB, implementation=_RING)
            self.model.make_train_function(force=True)
            self.functions[pack_mb] = self.model.train_function
            keras_fit.fit(self.model, self.dataset, self.model.train_function, 1)  # traced now, not in a measured turn
        return self.functions[pack_mb]

    def first(self) -> dict[str, Any]:
        keras_fit.fit(self.model, self.dataset, self.function(0), 1)
        return keras_fit.facts(self.model, self.spec)

    def measure(self, pack_mb: int, steps: int, warm: int) -> dict[str, Any]:
        function = self.function(pack_mb)

        def run(calls: int) -> serve.Clock:
            return keras_fit.fit(self.model, self.dataset, function, calls)

        return serve.turn(run, steps, warm, self.spec["interface"])


def make(spec: dict[str, Any]) -> dict[str, Any]:
    mirrored = Mirrored(spec)
    return {name: getattr(mirrored, name) for name in ("first", "measure")}


if __name__ == "__main__":
    serve.serve(make)
