"""What could look at variables between two batches of a Keras `fit`: callbacks, the data, overridden methods.

Names are compared instead of classes: there are three Kerases, and which one drives is known only when `fit` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tf_caramel.runtime import tf_private

_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_ROOTS = ("keras", "tf_keras", "tf_caramel")
# Classes whose batch hooks, read in Keras 2.15, tf_keras 2.21 and Keras 3.15, do not look at what updates write:
# bars, logs, summaries of logs, tracing, the learning rate (pending updates keep the one they were computed with).
# BroadcastGlobalVariablesCallback applies what is pending before it acts.
_HARMLESS = frozenset(
    {
        "BaseLogger", "BroadcastGlobalVariablesCallback", "LearningRateWarmupCallback", "ProgbarLogger", "TensorBoard",
        "TerminateOnNaN",
    }
)  # fmt: skip
_SAVING = frozenset({"BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint"})  # harmless if they save at epochs' ends
# Methods of a model that `fit` calls between the last batch and the epoch's end, or that are its loop.
_METHODS = ("evaluate", "get_metrics_result", "make_train_function")
_DATA = ("numpy", "pandas", "scipy")
_PLAIN = (bool, int, float, complex, str, bytes)
_PYTHON_OPS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})


def reasons(model: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Why something could look between batches of `model.fit(**arguments)`; empty if nothing can."""
    found = []
    if getattr(model, "run_eagerly", False):
        found.append("run_eagerly")
    for name in _METHODS:
        if _root(getattr(model, name, None)) not in _ROOTS:
            found.append(f"the model overrides {name}()")
    for callback in _flat(getattr(arguments.get("callbacks"), "callbacks", arguments.get("callbacks"))):
        hook = next((hook for hook in _HOOKS if _looks(callback, hook)), None)
        if hook is not None:
            found.append(f"callback {type(callback).__name__} may act on each batch ({hook})")
    for name in ("x", "y", "sample_weight", "validation_data"):
        strange = next((what for part in _flat(arguments.get(name)) if (what := _runs_python(part))), None)
        if strange is not None:
            found.append(f"{name} is {strange}, which may run between batches")
    return list(dict.fromkeys(found))


def _root(method: Any) -> str:
    return str(getattr(method, "__module__", "")).partition(".")[0]


def _flat(nested: Any) -> Iterator[Any]:
    if isinstance(nested, Mapping):
        nested = nested.values()
    elif not isinstance(nested, (list, tuple)):
        if nested is not None:
            yield nested
        return
    for part in nested:
        yield from _flat(part)


def _looks(callback: Any, hook: str) -> bool:
    method = getattr(callback, hook, None)
    if method is None or getattr(method, "_is_default", False):
        return False
    function = getattr(method, "__func__", None)  # None: set on the instance, as by LambdaCallback
    if function is None or _root(function) not in _ROOTS:
        return True
    name = function.__qualname__.partition(".")[0]
    if name in _SAVING:
        return getattr(callback, "save_freq", None) != "epoch" or bool(getattr(callback, "save_before_preemption", 0))
    return name not in _HARMLESS


def _runs_python(data: Any) -> str | None:
    """What runs Python of the user's when data are fetched; None if nothing does."""
    if isinstance(data, (tf.data.Dataset, tf.distribute.DistributedDataset)):
        ops = tf_private.dataset_ops(data)
        if ops is None:
            return f"a {type(data).__name__} whose functions cannot be seen"
        found = sorted(ops & _PYTHON_OPS)
        return f"a dataset with Python code in it ({found[0]})" if found else None
    if isinstance(data, (tf.Tensor, tf.Variable, tf.RaggedTensor, tf.SparseTensor, *_PLAIN)):
        return None
    if type(data).__module__.partition(".")[0] in _DATA:
        return None
    return f"a {type(data).__name__}"
