"""The record: what a training run leaves beside the profile and the plan of a step function, for people and the report.

Plain data, JSON. Only the key and the function's name are always there: a run may end before anything was measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tf_caramel.planner.profile import InputError, Reader

FORMAT = "tf_caramel record 1"
ARMS = ("deferred", "loose", "measured", "static", "traced")


@dataclass(frozen=True)
class Observed:
    """One message of a traced step, as it was seen. Times in seconds from the beginning of that step."""

    name: str
    bytes_: int
    start: float
    done: float


@dataclass(frozen=True)
class Record:
    """key, function: of the profile, and the step function's name.  origin: the policies that made the plan.

    chosen: which arm runs: "measured" (the plan made from the profile), "deferred" (that with updates in the next
    step), "loose" (deferred, the rest left to Horovod's fusion), "static" (the plan made without times) or "traced"
    (the function as TensorFlow traced it).  arms: step seconds of each, measured in turns.
    traced_step_seconds: median while tracing.  trace_cost: what tracing adds to a step, as a fraction of it.
    observed: messages of one traced step, of the static plan.
    unmatched: fraction of the traced kernels' time that belongs to no op of the profile.
    why: sentences about what was not done, and why.
    """

    key: str
    function: str
    ranks: int = 1
    origin: str = "static"
    chosen: str = "static"
    arms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    traced_step_seconds: float | None = None
    trace_cost: float | None = None
    observed: tuple[Observed, ...] = ()
    unmatched: float | None = None
    why: tuple[str, ...] = ()

    def median(self, arm: str) -> float | None:
        """Median step time of an arm in seconds; None if it was not measured."""
        seconds = self.arms.get(arm, ())
        return statistics.median(seconds) if seconds else None

    def to_json(self) -> str:
        data = {"format": FORMAT} | vars(self)
        data["arms"] = {arm: list(self.arms[arm]) for arm in ARMS if arm in self.arms}
        data["observed"] = [[o.name, o.bytes_, o.start, o.done] for o in self.observed]
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "record") -> Record:
        """Reads what `to_json` wrote. Raises InputError naming `source` and the field."""
        data = Reader.parse(text, source, FORMAT)
        chosen = data.text("chosen", "static")
        if chosen not in ARMS:
            raise data.error("chosen", chosen, f"one of {', '.join(ARMS)}")
        ranks = data.count("ranks", 1)
        if not ranks:
            raise data.error("ranks", ranks, "1 or more")
        return cls(
            key=data.text("key"),
            function=data.text("function"),
            ranks=ranks,
            origin=data.text("origin", "static"),
            chosen=chosen,
            arms=_arms(data),
            traced_step_seconds=data.seconds("traced_step_seconds", None),
            trace_cost=data.seconds("trace_cost", None),
            observed=tuple(_observed(data)),
            unmatched=data.seconds("unmatched", None),
            why=tuple(data.texts("why", ())),
        )


def _arms(data: Reader) -> dict[str, tuple[float, ...]]:
    if "arms" not in data.value:
        return {}
    arms = data.item("arms")
    for arm, seconds in arms.value.items():
        if arm not in ARMS:
            raise data.error("arms", arm, f"one of {', '.join(ARMS)}")
        if not isinstance(seconds, list) or not all(_is_seconds(s) for s in seconds):
            raise arms.error(arm, seconds, "a list of step times in seconds")
    return {arm: tuple(map(float, arms.value[arm])) for arm in ARMS if arm in arms.value}


def _observed(data: Reader) -> list[Observed]:
    rows = data.value.get("observed", [])
    if not isinstance(rows, list):
        raise data.error("observed", rows, "a list")
    result = []
    for k, row in enumerate(rows):
        match row:
            case [str(name), int(bytes_), start, done] if bytes_ >= 0 and _is_seconds(start) and _is_seconds(done):
                result.append(Observed(name, bytes_, float(start), float(done)))
            case _:
                raise data.error(f"observed[{k}]", row, "[name, bytes, start seconds, done seconds]")
        if done < start:
            raise InputError(f"{data.source}: observed[{k}]: {name!r} is done before it starts")
    return result


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
