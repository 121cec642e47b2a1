"""What every rank's script needs: the Keras under test, Horovod initialised, data that differs between ranks."""

import importlib
import os

import numpy as np

import tf_caramel  # first, so that its settings reach hvd.init()

if os.environ.get("KERAS") == "tf_keras":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
import horovod.tensorflow as hvd
import tensorflow as tf

from tests.report import digest, put

keras = importlib.import_module(os.environ.get("KERAS", "keras"))
KERAS_3 = keras.__version__.startswith("3")
hvd.init()
if os.environ.get("TEST_NO_STORE"):  # as under MPI: no launcher's store to agree through
    hvd.allreduce(tf.constant(0.0))  # Horovod itself reads the address a little after init() has returned
    del os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
RANK, SIZE = hvd.rank(), hvd.size()
report = put
__all__ = [
    "KERAS_3",
    "RANK",
    "SIZE",
    "data",
    "digest",
    "hvd",
    "keras",
    "mlp",
    "np",
    "put",
    "report",
    "state",
    "tf",
    "tf_caramel",
]


def data(samples=64, features=12, classes=4, rank=None):
    """This rank's own samples (or those of another rank)."""
    rng = np.random.RandomState(100 + (RANK if rank is None else rank))
    return rng.rand(samples, features).astype("f4"), rng.randint(0, classes, samples)


def mlp(features=12, classes=4, width=16, base=None):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    inputs = keras.Input((features,))
    x = layers.Dense(width, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Dense(width, activation="relu")(x)
    return (base or keras.Model)(inputs, layers.Dense(classes)(x))


def state(model, optimizer):
    """The exact bits of all that training changes and ranks must share (batch statistics are each rank's own)."""
    variables = optimizer.variables
    variables = variables() if callable(variables) and not isinstance(variables, list) else variables
    return digest([*model.trainable_weights, *variables])
