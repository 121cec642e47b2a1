"""What the TensorFlow programs share: a compiled Keras model that `fit` trains on one batch, again and again."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from examples.benchmarks.programs.serve import Clock

# In a spec: model, batch (None: the model's own), rank, accelerator (seconds of a step in which layers wait instead of
# computing, or None) and steps_per_execution.
WAITING_THREADS = 8  # a layer that waits takes a thread


def one_core(spec: dict[str, Any]) -> None:
    """A host has one core: one thread computes, a second one lets an op start while another runs."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(WAITING_THREADS if spec["accelerator"] else 2)


def build(spec: dict[str, Any]) -> Any:
    """The model, not compiled."""
    import keras

    from examples.benchmarks.models import MODELS

    keras.utils.set_random_seed(1)
    model = MODELS[spec["model"]].build()
    if not spec["accelerator"]:
        return model
    from examples.benchmarks import accelerator

    times = accelerator.from_flops(model, batch_size(spec), 1.0)
    return accelerator.waiting(model, times.scaled(spec["accelerator"]))


def batch_size(spec: dict[str, Any]) -> int:
    from examples.benchmarks.models import MODELS

    return int(spec["batch"] or MODELS[spec["model"]].batch)


def compile_(model: Any, spec: dict[str, Any], wrap: Any = lambda optimizer: optimizer) -> Any:
    import keras

    from examples.benchmarks.models import MODELS

    optimizer = wrap(keras.optimizers.SGD(1e-4, momentum=0.9))
    steps = spec.get("steps_per_execution", 1)
    model.compile(optimizer, MODELS[spec["model"]].loss(), jit_compile=False, steps_per_execution=steps)
    return model


def batches(spec: dict[str, Any], copies: int = 1) -> Any:
    """One batch of this rank, repeated for ever. copies: of it in one element."""
    import numpy as np

    from examples.benchmarks.models import data

    x, y = (np.concatenate([part] * copies) for part in data(spec["model"], batch_size(spec), spec["rank"]))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensors((x, y)).repeat().with_options(options)


def fit(model: Any, dataset: Any, function: Any, calls: int, steps: int = 1) -> Clock:
    """`calls` calls of a train function under `fit`, each of `steps` steps."""
    clock = model.train_function = Clock(function, steps)
    model.fit(dataset, steps_per_epoch=calls * steps, verbose=0)
    model.train_function = function
    return clock


def facts(model: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """What the tables say of a model."""
    from examples.benchmarks.models import MODELS

    variables = model.trainable_variables
    return {
        "batch": batch_size(spec),
        "description": MODELS[spec["model"]].description,
        "gradient_bytes": sum(int(tf.size(v.value)) * tf.as_dtype(v.dtype).size for v in variables),
    }
