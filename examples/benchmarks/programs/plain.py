"""Plain Horovod, as a Keras 3 user has to write it, with any of its settings; and computing and the network alone.

On Keras 3, hvd.DistributedOptimizer exchanges nothing, so the train step uses hvd.DistributedGradientTape.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from examples.benchmarks.programs import again, keras_fit, layers, serve

AUTOTUNE_CALLS = 5


class Plain:
    """functions: way of exchanging -> train function: "0" no groups, "1", "8" so many, "local" none at all."""

    def __init__(self, spec: dict[str, Any]) -> None:
        keras_fit.one_core(spec)
        hvd.init()
        self.spec = spec
        self.model = keras_fit.compile_(keras_fit.build(spec), spec)
        self.dataset = keras_fit.batches(spec)
        self.functions: dict[str, Any] = {}
        self._reduce: Any = None

    def function(self, exchange: str) -> Any:
        if exchange not in self.functions:
            model = self.model
            model.train_step = _train_step(model, None if exchange == "local" else int(exchange))
            model.make_train_function(force=True)
            self.functions[exchange] = model.train_function
            keras_fit.fit(model, self.dataset, model.train_function, 1)  # traced now, not in a turn that is measured
        return self.functions[exchange]

    def run(self, exchange: str) -> Callable[[int], serve.Clock]:
        if exchange == "network":
            return self._network
        return lambda calls: keras_fit.fit(self.model, self.dataset, self.function(exchange), calls)

    def _network(self, calls: int) -> serve.Clock:
        """The all-reduce of all gradients' bytes, handed over at once, nothing else going on."""
        if self._reduce is None:
            values = [tf.zeros(v.shape, v.dtype) for v in self.model.trainable_variables]
            function = tf.function(
                lambda: hvd.grouped_allreduce(values, name="benchmark.network", op=hvd.Sum), autograph=False
            )
            self._reduce = function
            function()
        clock = serve.Clock(self._reduce)
        for _ in range(calls):
            clock()
        return clock

    def first(self) -> dict[str, Any]:
        self.run("0")(1)
        described = {} if self.spec["accelerator"] else {"layers": layers.described(self.model)}
        return keras_fit.facts(self.model, self.spec) | described

    def measure(self, exchange: str, steps: int, warm: int) -> dict[str, Any]:
        return serve.turn(self.run(exchange), steps, warm, self.spec["interface"])

    def count(self, exchange: str, steps: int) -> float | None:
        """Messages a step; None on all ranks but the first."""
        return again.messages(self.run(exchange), steps)

    def settle(self, seconds: float) -> dict[str, Any]:
        """Trains for so long: how many steps that took, and the log of Horovod's own tuning."""
        log, steps = Path(os.environ.get("HOROVOD_AUTOTUNE_LOG", "")), 0
        began, done = time.perf_counter(), False
        while not done:
            self.run("0")(AUTOTUNE_CALLS)
            steps += AUTOTUNE_CALLS
            # One rank's clock decides for all, or they would stop at different steps.
            mine = time.perf_counter() - began > seconds
            done = bool(hvd.broadcast(tf.constant(mine), 0, name="benchmark.settle"))
        return {"steps": steps, "log": log.read_text().splitlines() if log.is_file() else []}


def _train_step(model: Any, groups: int | None) -> Callable[[Any], Any]:
    """groups: of the exchange, 0 for none; None: nothing is exchanged."""

    def train_step(data: Any) -> Any:
        x, y = data
        variables = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        if groups is not None:
            tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True, num_groups=groups)
        model.optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return {"loss": loss}

    return train_step


def make(spec: dict[str, Any]) -> dict[str, Any]:
    plain = Plain(spec)
    return {"init": again.init} | {name: getattr(plain, name) for name in ("first", "measure", "count", "settle")}


if __name__ == "__main__":
    serve.serve(make)
