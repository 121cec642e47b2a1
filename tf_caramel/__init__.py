"""Data-parallel TensorFlow training on Horovod, with computed transfer boundaries.

    TF_CARAMEL=1 horovodrun -np 4 python train.py

    opt = tf_caramel.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer=opt, loss=...); model.fit(...)

This module is light: TensorFlow and Horovod are imported when something that trains is first used, or at once when
TF_CARAMEL is on. The planner and the command line work without either.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "DistributedOptimizer": "tf_caramel.optimizer",
    "AgreementError": "tf_caramel.runtime.ranks",
    "callbacks": "tf_caramel.callbacks",
    "flush": "tf_caramel.runtime.deferral",
    "report": "tf_caramel.runtime.reporting",
}
__all__ = ["AgreementError", "DistributedOptimizer", "callbacks", "flush", "report"]

_NO_HOROVOD = (
    "tf_caramel trains with Horovod, which is not installed here. Run:  caramel build-horovod\n"
    "(pip alone would build it without TensorFlow, and its build fails on TensorFlow 2.16 and later)"
)


def _horovod_is_here() -> bool:
    return importlib.util.find_spec("horovod") is not None


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'tf_caramel' has no attribute {name!r}")
    if not _horovod_is_here():
        raise ImportError(_NO_HOROVOD)
    module = importlib.import_module(_EXPORTS[name])
    return module if name == "callbacks" else getattr(module, name)


def _start() -> None:
    if sys.argv[:1] and sys.argv[0].endswith("caramel"):
        return  # the command line says itself what it needs
    if not _horovod_is_here():
        warnings.warn(_NO_HOROVOD, stacklevel=3)
        return
    from tf_caramel import config

    loaded = config.load()
    if loaded.enabled:
        importlib.import_module("tf_caramel.runtime.hook").install(loaded)


_start()
