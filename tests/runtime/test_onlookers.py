"""What can look between two batches of `fit`, for every Keras: callbacks one by one, kinds of data, models."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import tensorflow as tf

import tf_caramel
from tests.horovod.conftest import KERAS
from tf_caramel.runtime import onlookers

ARRAY = np.zeros((4, 3), "f4")
DATASET = tf.data.Dataset.from_tensor_slices(ARRAY)


@pytest.fixture(params=KERAS)
def keras(request):
    return importlib.import_module(request.param)


def model(keras, base=None):
    made = (base or keras.Sequential)([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def why(keras, **arguments):
    return onlookers.reasons(model(keras), arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda c, folder: c.History(),
        lambda c, folder: c.ProgbarLogger(),
        lambda c, folder: c.TerminateOnNaN(),
        lambda c, folder: c.EarlyStopping(),
        lambda c, folder: c.ReduceLROnPlateau(),
        lambda c, folder: c.LearningRateScheduler(lambda epoch: 0.1),
        lambda c, folder: c.CSVLogger(f"{folder}/log.csv"),
        lambda c, folder: c.TensorBoard(folder),
        lambda c, folder: c.ModelCheckpoint(f"{folder}/x.keras"),
        lambda c, folder: c.BackupAndRestore(folder),
        lambda c, folder: c.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        lambda c, folder: tf_caramel.callbacks.BroadcastGlobalVariablesCallback(0),
        lambda c, folder: tf_caramel.callbacks.MetricAverageCallback(),
        lambda c, folder: tf_caramel.callbacks.LearningRateWarmupCallback(0.1),
    ],
)
def test_known_callbacks_do_not_look(keras, tmp_path, make):
    callback = make(keras.callbacks, str(tmp_path))
    assert why(keras, callbacks=[callback]) == why(keras, callbacks=callback) == []
    assert why(keras, callbacks=keras.callbacks.CallbackList([callback])) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda c, folder: c.ModelCheckpoint(f"{folder}/x.keras", save_freq=5),
        lambda c, folder: c.BackupAndRestore(folder, save_freq=5),
        lambda c, folder: c.LambdaCallback(on_train_batch_end=lambda batch, logs: None),
        lambda c, folder: type("Own", (c.Callback,), {"on_train_batch_begin": lambda self, batch, logs=None: None})(),
        lambda c, folder: type("Old", (c.Callback,), {"on_batch_end": lambda self, batch, logs=None: None})(),
        lambda c, folder: type("Also", (c.ProgbarLogger,), {"on_train_batch_end": lambda self, *_, **__: None})(),
    ],
)
def test_other_callbacks_with_batch_hooks_may(keras, tmp_path, make):
    callback = make(keras.callbacks, str(tmp_path))
    (reason,) = why(keras, callbacks=[keras.callbacks.History(), callback])
    assert reason.startswith(f"callback {type(callback).__name__} may act on each batch (on_")


@pytest.mark.parametrize(
    "data", [ARRAY, [ARRAY, {"a": ARRAY}], tf.constant(ARRAY), DATASET.map(lambda x: x + 1).batch(2).prefetch(1), None]
)
def test_arrays_and_datasets_do_not_look(keras, data):
    assert why(keras, x=data, y=ARRAY, validation_data=(ARRAY, ARRAY)) == []


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ((x for x in [ARRAY]), "a generator"),
        (map(np.copy, [ARRAY]), "a map"),
        (DATASET.map(lambda x: tf.numpy_function(np.copy, [x], tf.float32)).batch(2), "Python code in it (PyFunc)"),
        (tf.data.Dataset.from_generator(lambda: iter([1.0]), tf.float32), "Python code in it (EagerPyFunc)"),
    ],
)
def test_data_that_python_fetches_may_look(keras, data, what):
    (reason,) = why(keras, x=data)
    assert what in reason
    assert why(keras, validation_data=data)[0].startswith("validation_data")


def test_a_sequence_may_look(keras):
    kind = getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence
    made = type("Rows", (kind,), {"__len__": lambda self: 1, "__getitem__": lambda self, k: (ARRAY, ARRAY)})()
    assert why(keras, x=made) == ["x is a Rows, which may run between batches"]


def test_eager_models_and_overridden_methods_may_look(keras):
    eager = model(keras)
    eager.compile("sgd", "mse", run_eagerly=True)
    assert onlookers.reasons(eager, {}) == ["run_eagerly"]
    own = type("Own", (keras.Sequential,), {"get_metrics_result": lambda self: {}})
    assert onlookers.reasons(model(keras, own), {}) == ["the model overrides get_metrics_result()"]
    step = type("Step", (keras.Sequential,), {"train_step": lambda self, data: {}})
    assert onlookers.reasons(model(keras, step), {}) == []
