"""The TF_CARAMEL* environment variables as one frozen value. A bad or unknown one is an error that names it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from graph_passes import manager

PREFIX = "TF_CARAMEL"
_KNOWN = ("TF_CARAMEL", "TF_CARAMEL_PIPELINE", "TF_CARAMEL_DUMP", "TF_CARAMEL_TIMEOUT")
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


class ConfigError(ValueError):
    """An environment variable has a value that cannot be used."""


@dataclass(frozen=True)
class Config:
    """enabled: rewrite functions (TF_CARAMEL).  pipeline: the passes (TF_CARAMEL_PIPELINE).
    dump: folder for the graphs before and after each pass, or None (TF_CARAMEL_DUMP).
    timeout_seconds: how long a rank waits for the others to agree (TF_CARAMEL_TIMEOUT, default 25).
    """

    enabled: bool = False
    pipeline: str = manager.DEFAULT
    dump: str | None = None
    timeout_seconds: float = 25.0


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Reads the variables. Raises ConfigError naming the variable, its value and what is allowed."""
    env = os.environ if environ is None else environ
    for name in sorted(env):
        if (name == PREFIX or name.startswith(PREFIX + "_")) and name not in _KNOWN:
            close = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(_KNOWN)}"
            raise ConfigError(f"{name} is not a variable of this version of tf_caramel{hint}")
    flag = env.get("TF_CARAMEL", "").strip().lower()
    if flag not in _ON + _OFF:
        raise ConfigError(f"TF_CARAMEL={env['TF_CARAMEL']!r}: use 1 (on) or 0 (off)")
    pipeline = env.get("TF_CARAMEL_PIPELINE", "").strip() or manager.DEFAULT
    try:
        manager.parse(pipeline)
    except ValueError as error:
        raise ConfigError(f"TF_CARAMEL_PIPELINE={pipeline!r}: {error}") from error
    timeout = env.get("TF_CARAMEL_TIMEOUT", "").strip() or str(Config.timeout_seconds)
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"TF_CARAMEL_TIMEOUT={timeout!r}: use a number of seconds above 0")
    return Config(flag in _ON, pipeline, env.get("TF_CARAMEL_DUMP") or None, seconds)
