"""Where updates may stay pending between calls: in a Keras `fit` in which nothing can look at variables in between.

`fit` is wrapped, once for each Keras. A scope stands for one `fit`: it knows what could look, closes itself before
epochs' ends and validation, where anything may look, and applies what is pending however `fit` ends.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import weakref
from types import TracebackType
from typing import Any

from tf_caramel.callbacks import Callback
from tf_caramel.config import Config
from tf_caramel.runtime import deferral, onlookers, ranks

log = logging.getLogger("tf_caramel")
_ours: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers
_scopes: list[Scope] = []  # fits nest: a callback may train another model
_KERAS = ("keras", "tf_keras")
_LONGEST = 300  # characters of a foreign error that are passed on
NOT_IN_FIT = (
    "no update is deferred from one call to the next: the step is called outside fit, or by fit with an optimizer that "
    "tf_caramel did not wrap (TF_CARAMEL_DEFER=across with tf_caramel.flush() before variables are read allows it)"
)


def install(optimizer: Any) -> None:
    """From now on every `fit` of a model with this optimizer is a scope."""
    for kind in type(optimizer).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in _KERAS:
            model = importlib.import_module(root).Model
            if not hasattr(model.fit, "_caramel"):
                model.fit = _wrap(model.fit)
            _ours.add(optimizer)
            return


def _wrap(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
            ours = self.optimizer in _ours
        except (TypeError, AttributeError):  # Keras says it better
            return original(self, *args, **kwargs)
        if not ours:
            return original(self, *args, **kwargs)
        with Scope(self, bound.arguments) as scope:
            bound.arguments["callbacks"] = scope.callbacks()
            return original(*bound.args, **bound.kwargs)

    fit._caramel = True  # type: ignore[attr-defined]
    return fit


def across(step: Any) -> bool:
    """May updates of this step stay pending when the call that runs now returns? The same on all its ranks."""
    config: Config = step.config
    if config.defer == "across":  # the user vouches for it
        return True
    if config.defer != "auto":
        return False
    if not _scopes:
        step.remark(NOT_IN_FIT)
        return False
    return _scopes[-1].allows(step)


class Scope:
    """One `fit` of `model`, called with those arguments.

    open: is a call that comes now one of the loop over batches?  agreed: ranks -> do they all allow it?
    """

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self.open = False
        self.agreed: dict[tuple[int, ...], bool] = {}
        self.given: Any = None  # Keras's own list of callbacks, if the user gave one
        self.ends: list[Any] = [_First(self), _Last(self)]

    def callbacks(self) -> Any:
        """The callbacks that fit is to be called with: the scope's own around the user's."""
        given = self.arguments.get("callbacks")
        if hasattr(given, "callbacks") and hasattr(given, "set_params"):
            self.given = given
            given.callbacks[:] = [self.ends[0], *given.callbacks, self.ends[1]]
            return given
        users = list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []
        return [self.ends[0], *users, self.ends[1]]

    def allows(self, step: Any) -> bool:
        if not self.open:
            return False  # some callback trains
        if step.members not in self.agreed:
            reasons = {"why": onlookers.reasons(self.model, self.arguments)}
            verdict = ranks.agree("fit", reasons, _judge, step.members, step.config.timeout_seconds)
            self.agreed[step.members] = not verdict["why"]
            if verdict["why"]:
                step.remark("no update is deferred from one call of fit to the next: " + "; ".join(verdict["why"]))
        return self.agreed[step.members]

    def close(self) -> None:
        """From here on anything may look."""
        self.open = False
        deferral.flush()

    def __enter__(self) -> Scope:
        ranks.back()
        _scopes.append(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is None:
                deferral.flush()
            else:
                deferral.flush_after(error)
        finally:
            _scopes.remove(self)
            if self.given is not None:
                self.given.callbacks[:] = [c for c in self.given.callbacks if c not in self.ends]
            if error is not None and not isinstance(error, ranks.AgreementError):
                ranks.leave(f"{type(error).__name__}: {error}"[:_LONGEST])


def _judge(shown: dict[int, Any]) -> dict[str, Any]:
    """What any rank says counts for all: flushing is a collective, so all ranks must know alike when to."""
    who: dict[str, list[int]] = {}
    for rank in sorted(shown):
        for reason in shown[rank]["why"]:
            who.setdefault(reason, []).append(rank)
    return {
        "why": [
            reason if len(said) == len(shown) else f"{reason} (on rank {', '.join(map(str, said))})"
            for reason, said in who.items()
        ]
    }


class _End(Callback):
    _supports_tf_logs = True  # Keras 2 fetches the logs of every batch for callbacks that do not say so

    def __init__(self, scope: Scope) -> None:
        self.scope = scope


class _First(_End):
    """Before the user's callbacks: variables are exact, and calls that those make are none of the loop's."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.scope.close()

    def on_test_begin(self, logs: Any = None) -> None:
        self.scope.close()

    def on_predict_begin(self, logs: Any = None) -> None:
        self.scope.close()

    def on_train_end(self, logs: Any = None) -> None:
        self.scope.close()


class _Last(_End):
    """After the user's callbacks: the next calls are the loop's."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.scope.open = True
