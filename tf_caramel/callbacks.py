"""Horovod's training callbacks in a form that Keras 3, Keras 2 and tf_keras can all run.

They share a base class of their own instead of one Keras's: which Keras drives them is known only when `fit` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from tf_caramel.runtime import deferral

log = logging.getLogger("tf_caramel")

_HOOKS = [
    f"on_{what}_{when}"
    for what in ("epoch", "batch", "train_batch", "test_batch", "predict_batch", "train", "test", "predict")
    for when in ("begin", "end")
]
# What Horovod can broadcast; anything else (bfloat16, the uint32 of seeds) travels as its bytes.
_HOROVOD_DTYPES = frozenset(
    ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
)


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """This hook does nothing."""


_nothing._is_default = True  # type: ignore[attr-defined]  # Keras's mark of a hook that needs no call per batch


class Callback:
    """What all Keras versions ask of a callback."""

    model: Any = None
    params: dict[str, Any]

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def _implements(self, what: str) -> bool:
        hooks = [h for h in _HOOKS if h.startswith(what)]
        return any(not getattr(getattr(self, h), "_is_default", False) for h in hooks)

    def _implements_train_batch_hooks(self) -> bool:
        return self._implements("on_train_batch") or self._implements("on_batch")

    def _implements_test_batch_hooks(self) -> bool:
        return self._implements("on_test_batch")

    def _implements_predict_batch_hooks(self) -> bool:
        return self._implements("on_predict_batch")


for _hook in _HOOKS:
    setattr(Callback, _hook, _nothing)


class BroadcastGlobalVariablesCallback(Callback):
    """Gives every rank the model's and the optimizer's variables of `root_rank`, once, after the first batch.

    After and not before it, because only then all of the optimizer's variables exist. device: where it happens.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        self.root_rank, self.device, self.done = root_rank, device, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.done:
            return
        self.done = True
        deferral.flush()
        if hvd.size() > 1:
            with tf.device(self.device):
                broadcast_variables([*self.model.weights, *_optimizer_variables(self.model)], self.root_rank)


def broadcast_variables(variables: list[Any], root_rank: int) -> None:
    """Assigns the values on `root_rank` to the variables (Keras 3, Keras 2 or tf.Variable) of every rank."""
    seen: dict[int, Any] = {}
    for variable in variables:
        inner = variable if isinstance(variable, tf.Variable) else variable.value
        seen.setdefault(id(inner), inner)

    @tf.function
    def broadcast() -> None:
        for number, variable in enumerate(seen.values()):
            value = tf.convert_to_tensor(variable)
            plain = value.dtype.name in _HOROVOD_DTYPES
            sent = value if plain else tf.bitcast(value, tf.uint8)
            got = hvd.broadcast(sent, root_rank, name=f"HorovodBroadcast_caramel_{number}", ignore_name_scope=True)
            variable.assign(got if plain else tf.bitcast(got, value.dtype))

    broadcast()


def _optimizer_variables(model: Any) -> list[Any]:
    variables = model.optimizer.variables
    return list(variables() if callable(variables) and not isinstance(variables, list) else variables)


class MetricAverageCallback(Callback):
    """Replaces the logs of an epoch's end by their means over the ranks. Put it before callbacks that read them.

    Raises ValueError on every rank if the ranks do not log the same metrics.
    """

    def __init__(self, device: str = "") -> None:
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or hvd.size() < 2:
            return
        mine = {name: float(value) for name, value in sorted(logs.items())}
        with tf.device(self.device):
            everyone = hvd.allgather_object(mine, name="tf_caramel.metrics")
        for rank, theirs in enumerate(everyone):
            if list(theirs) != list(everyone[0]):
                raise ValueError(f"rank 0 logs the metrics {list(everyone[0])}, rank {rank} {list(theirs)}")
        logs.update({name: sum(theirs[name] for theirs in everyone) / len(everyone) for name in mine})


class LearningRateWarmupCallback(Callback):
    """Raises the learning rate from initial_lr / size to initial_lr, batch by batch, over the first epochs.

    initial_lr: the rate after the warm-up, already multiplied by the number of ranks (Goyal et al., 2017,
    arXiv 1706.02677). steps_per_epoch: needed only where Keras does not know it. momentum_correction: scales a momentum
    that is a variable along with the rate; recent Keras bakes momentum into the step, which is then said once.
    verbose: 1 prints the final rate. Raises TypeError if the optimizer follows a schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if initial_lr is None or not initial_lr > 0:
            raise ValueError(f"initial_lr={initial_lr!r}: give the learning rate after the warm-up, above 0")
        if not warmup_epochs > 0:
            raise ValueError(f"warmup_epochs={warmup_epochs!r}: it must be above 0")
        self.initial_lr, self.warmup_epochs, self.verbose = initial_lr, warmup_epochs, verbose
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.epoch = 0
        self.over = False
        self.restore: Callable[[], None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        schedule = getattr(self.model.optimizer, "_learning_rate", None)
        if callable(schedule) and not hasattr(schedule, "assign"):
            raise TypeError("LearningRateWarmupCallback sets the learning rate, but the optimizer follows a schedule")
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError("LearningRateWarmupCallback: Keras does not know steps_per_epoch; give it as an argument")
        momentum = getattr(self.model.optimizer, "momentum", 0.0)
        if self.momentum_correction and isinstance(momentum, (int, float)) and momentum:
            log.warning("tf_caramel: no momentum correction in the warm-up: this Keras keeps momentum as a constant")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.over:
            return
        assert self.steps_per_epoch
        done = self.epoch + (batch + 1) / self.steps_per_epoch
        self.over = done >= self.warmup_epochs
        ramp = min(1.0, (1 + done * (hvd.size() - 1) / self.warmup_epochs) / hvd.size())
        self._set(self.initial_lr * ramp)
        if self.over and self.verbose and hvd.rank() == 0:
            print(f"Epoch {self.epoch + 1}: finished gradual learning rate warm-up to {self.initial_lr:g}.")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.restore:
            self.restore()
            self.restore = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _number(self.model.optimizer.learning_rate)

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        before = _number(optimizer.learning_rate)
        optimizer.learning_rate = rate
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, tf.Variable) and before:
            kept = _number(momentum)
            momentum.assign(kept * rate / before)
            self.restore = lambda: momentum.assign(kept)


def _number(value: Any) -> float:
    return float(tf.convert_to_tensor(value))
