"""What the wrapper refuses, and that it leaves the instance it wraps what it was. Ranks are tested in tests/horovod."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest

from tf_caramel import DistributedOptimizer


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_locking": True}, "use_locking is not supported by tf_caramel yet"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step is not supported"),
        ({"average_aggregated_gradients": True}, "average_aggregated_gradients is not supported"),
        ({"scale_local_gradients": False}, "scale_local_gradients is not supported"),
        ({"op": hvd.Adasum}, "op="),
        ({"op": hvd.Min}, "op="),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"gradient_predivide_factor": float("nan")}, "gradient_predivide_factor=nan"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor needs op=hvd.Average"),
        ({"groups": 0}, "groups=0"),
        ({"groups": True}, "groups=True"),
        ({"groups": "all"}, "groups='all'"),
        ({"num_groups": -1}, "num_groups=-1"),
        ({"num_groups": 2, "groups": 2}, "num_groups=2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


def test_a_compression_without_its_methods_is_refused():
    with pytest.raises(TypeError, match="compression="):
        DistributedOptimizer(keras.optimizers.SGD(0.1), compression="fp16")


@pytest.mark.parametrize("wrong", ["adam", keras.optimizers.SGD, None])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(TypeError, match="is not an instance of a Keras optimizer"):
        DistributedOptimizer(wrong)


def test_wrapping_twice_is_refused():
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="is wrapped already"):
        DistributedOptimizer(optimizer)


def test_a_variable_in_two_groups_is_refused():
    variable = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]).trainable_variables[0]
    with pytest.raises(ValueError, match="a variable is in two groups"):
        DistributedOptimizer(keras.optimizers.SGD(0.1), groups=[[variable], [variable]])


def test_the_instance_stays_what_it_was():
    optimizer = keras.optimizers.Adam(0.01, beta_1=0.8)
    kind, config = type(optimizer), optimizer.get_config()
    wrapped = DistributedOptimizer(optimizer, name="MyName")
    assert wrapped is optimizer
    assert type(wrapped) is kind
    assert wrapped.get_config() == config
    assert keras.optimizers.deserialize(keras.optimizers.serialize(wrapped)).get_config() == config


def test_a_step_before_init_says_so():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.MeanSquaredError(), jit_compile=False)
    with pytest.raises(RuntimeError, match=r"call hvd.init\(\) before the first step"):
        model.fit(np.ones((1, 2)), np.ones((1, 1)), verbose=0)
