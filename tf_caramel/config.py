"""The TF_CARAMEL* environment variables as one frozen value. A bad or unknown one is an error that names it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graph_passes import manager
from tf_caramel.planner import decide

PREFIX = "TF_CARAMEL"
PLAN = "caramel,adaptive"
_KNOWN = (
    "TF_CARAMEL",
    "TF_CARAMEL_PIPELINE",
    "TF_CARAMEL_PLAN",
    "TF_CARAMEL_TRACE_STEPS",
    "TF_CARAMEL_CACHE",
    "TF_CARAMEL_DUMP",
    "TF_CARAMEL_TIMEOUT",
    "TF_CARAMEL_DEFER",
    "TF_CARAMEL_PRIORITY",
)
DEFER = ("auto", "off", "within", "across")
PRIORITY = ("off", "auto")
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")


class ConfigError(ValueError):
    """An environment variable has a value that cannot be used."""


@dataclass(frozen=True)
class Config:
    """enabled: rewrite functions (TF_CARAMEL).  pipeline: the passes (TF_CARAMEL_PIPELINE).
    plan: policies of the measured plan, "static" for none, or a plan's file (TF_CARAMEL_PLAN).
    trace_steps: how many calls are traced; 0: nothing is measured (TF_CARAMEL_TRACE_STEPS).
    cache: folder for profiles and plans, or None (TF_CARAMEL_CACHE).
    dump: folder for the graphs before and after each pass, or None (TF_CARAMEL_DUMP).
    defer: where updates may be deferred into the next step: auto, off, within, across (TF_CARAMEL_DEFER).
    priority: do Horovod's threads go before computing while a plan runs: auto (where it is allowed), off
    (TF_CARAMEL_PRIORITY).
    timeout_seconds: how long a rank waits for the others to agree (TF_CARAMEL_TIMEOUT, default 25).
    """

    enabled: bool = False
    pipeline: str = manager.DEFAULT
    plan: str = PLAN
    trace_steps: int = 5
    cache: str | None = None
    dump: str | None = None
    timeout_seconds: float = 25.0
    defer: str = "auto"
    priority: str = "off"

    @property
    def measures(self) -> bool:
        """May a measured plan replace the first one?"""
        return self.trace_steps > 0 and self.plan != "static" and not self.plan.endswith(".json")

    def shared(self) -> dict[str, object]:
        """What must be the same on every rank."""
        return {
            "TF_CARAMEL_PIPELINE": self.pipeline,
            "TF_CARAMEL_PLAN": self.plan,
            "TF_CARAMEL_TRACE_STEPS": self.trace_steps,
            "TF_CARAMEL_DEFER": self.defer,
        }


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
    # Whoever gives passes with constants of their own wants to see those run.
    plan = env.get("TF_CARAMEL_PLAN", "").strip() or (PLAN if pipeline == manager.DEFAULT else "static")
    if plan.endswith(".json"):
        if not os.path.isfile(plan):
            raise ConfigError(f"TF_CARAMEL_PLAN={plan!r}: there is no such file")
    else:
        try:
            decide.parse(plan)
        except ValueError as error:
            raise ConfigError(f"TF_CARAMEL_PLAN={plan!r}: {error}") from error
    steps = env.get("TF_CARAMEL_TRACE_STEPS", "").strip() or str(Config.trace_steps)
    if not steps.isdecimal() or int(steps) > 1000:
        raise ConfigError(f"TF_CARAMEL_TRACE_STEPS={steps!r}: use a number of steps, 0 (never measure) to 1000")
    timeout = env.get("TF_CARAMEL_TIMEOUT", "").strip() or str(Config.timeout_seconds)
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"TF_CARAMEL_TIMEOUT={timeout!r}: use a number of seconds above 0")
    defer = _one_of(DEFER, "TF_CARAMEL_DEFER", env) or Config.defer
    priority = _one_of(PRIORITY, "TF_CARAMEL_PRIORITY", env) or Config.priority
    dump = env.get("TF_CARAMEL_DUMP") or None
    return Config(flag in _ON, pipeline, plan, int(steps), _cache_folder(env), dump, seconds, defer, priority)


def _one_of(allowed: Sequence[str], name: str, env: Mapping[str, str]) -> str:
    given = env.get(name, "").strip().lower()
    if given and given not in allowed:
        raise ConfigError(f"{name}={env[name]!r}: use one of {', '.join(allowed)}")
    return given


def _cache_folder(env: Mapping[str, str]) -> str | None:
    given = env.get("TF_CARAMEL_CACHE", "").strip()
    if given.lower() in ("0", "off", "no", "false"):
        return None
    if given:
        return given
    home = env.get("XDG_CACHE_HOME") or (env.get("HOME") and os.path.join(env["HOME"], ".cache"))
    return os.path.join(home, "tf_caramel", "plans") if home else None
