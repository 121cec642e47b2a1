"""What the TensorFlow programs share: a compiled Keras model that `fit` trains on one batch, again and again."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from examples.benchmarks.programs.serve import Clock


def one_core() -> None:
    """A host has one core: one thread computes, a second one lets an op start while another runs."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def build(spec: dict[str, Any]) -> Any:
    """The model, not compiled. spec: model; accelerator: seconds of a step in which its layers wait, or None."""
    import keras

    from examples.benchmarks.models import MODELS

    keras.utils.set_random_seed(1)
    model = MODELS[spec["model"]]()
    if spec.get("accelerator") is None:
        return model
    from examples.benchmarks import accelerator

    times = accelerator.from_flops(model, spec["batch"], 1.0)
    return accelerator.waiting(model, times.scaled(spec["accelerator"]))


def compile_(model: Any, spec: dict[str, Any], wrap: Any = lambda optimizer: optimizer) -> Any:
    import keras

    optimizer = wrap(keras.optimizers.SGD(1e-4, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False, steps_per_execution=spec.get("steps_per_execution", 1))
    return model


def batches(spec: dict[str, Any], copies: int = 1) -> Any:
    """One batch of this rank, repeated for ever. copies: of it in one element."""
    import numpy as np

    from examples.benchmarks.models import data

    x, y = data(spec["model"], spec["batch"], spec["rank"])
    if copies > 1:
        x, y = np.concatenate([x] * copies), np.concatenate([y] * copies)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensors((x, y)).repeat().with_options(options)


def fit(model: Any, dataset: Any, function: Any, calls: int, steps: int = 1) -> Clock:
    """`calls` calls of a train function under `fit`, each of `steps` steps."""
    clock = model.train_function = Clock(function, steps)
    model.fit(dataset, steps_per_epoch=calls * steps, verbose=0)
    model.train_function = function
    return clock


def gradient_bytes(model: Any) -> int:
    return sum(int(tf.size(v.value)) * v.value.dtype.size for v in model.trainable_variables)
