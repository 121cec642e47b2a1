"""From the times of a cell to its figures: what each row took, and how far it is from what is possible."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from examples.benchmarks import arms

LOCAL, NETWORK = arms.LOCAL.name, arms.NETWORK.name
PRODUCT = "tf_caramel"  # what it chooses itself
TUNED = "Horovod, best of tuned"


@dataclass(frozen=True)
class Row:
    """One competitor in one cell. Times in seconds; all of a step.

    spread: distance between the quartiles over the median.  efficiency: E, 1 if all communication is hidden, 0 if none.
    exposed: communication that is not hidden, m - C.  scaling: C / m.  to_bound: m / max(C, N).
    messages: None where they could not be counted.  first: from the launch to the end of the first step.
    same_as: the row that this one is a choice of.
    """

    name: str
    seconds: float
    spread: float
    cpu_seconds: float
    sent_bytes: float
    peak_bytes: float
    messages: float | None
    first_seconds: float | None
    images: float
    scaling: float | None
    efficiency: float | None
    exposed: float | None
    to_bound: float | None
    same_as: str | None = None


@dataclass(frozen=True)
class Figures:
    """compute, network: C and N, each alone; None if plain Horovod did not take part.
    cpu: CPU seconds of both, each alone, together; they share one core.
    """

    compute: float | None
    network: float | None
    cpu: float
    rows: dict[str, Row]

    @property
    def bound(self) -> float | None:
        """max(C, N): no step can be shorter."""
        return max(self.compute, self.network) if self.compute and self.network else None

    @property
    def bound_with_cpu(self) -> float | None:
        """The same, and no shorter than the CPU time of computing and communicating, which one core has to do.

        An emulated accelerator takes next to no CPU time, so there it is max(C, N) most often.
        """
        return max(self.bound, self.cpu) if self.bound else None

    def times(self, name: str, other: str) -> float | None:
        """How many times faster than `other` a row is."""
        if name not in self.rows or other not in self.rows:
            return None
        return self.rows[other].seconds / self.rows[name].seconds


def median(arm: Mapping[str, Any]) -> float:
    return statistics.median(_counted(arm))


def _counted(arm: Mapping[str, Any]) -> list[float]:
    return [seconds for turn in arm["turns"] for seconds in turn["seconds"]]


def figures(cell: Mapping[str, Any]) -> Figures:
    measured = cell["arms"]
    compute, network = (median(measured[name]) if name in measured else None for name in (LOCAL, NETWORK))
    cpu = sum(statistics.median(t["cpu_seconds"] for t in arm["turns"]) for arm in _alone(measured))
    rows = {
        name: _row(name, arm, cell, compute, network) for name, arm in measured.items() if name not in (LOCAL, NETWORK)
    }
    for name, choices in ((PRODUCT, [arm.name for arm in arms.PRODUCT]), (TUNED, _tuned(cell))):
        there = [rows[choice] for choice in choices if choice in rows]
        if there:
            best = min(there, key=lambda row: row.seconds)
            rows[name] = Row(**{**vars(best), "name": name, "same_as": best.name})
    return Figures(compute, network, cpu, rows)


def _alone(measured: Mapping[str, Any]) -> list[Any]:
    return [measured[name] for name in (LOCAL, NETWORK) if name in measured]


def _tuned(cell: Mapping[str, Any]) -> list[str]:
    tuning = cell.get("tuning")
    return [arms.AS_IT_COMES.name, *tuning["best"]] if tuning else []


def _row(
    name: str, arm: Mapping[str, Any], cell: Mapping[str, Any], compute: float | None, network: float | None
) -> Row:
    seconds = _counted(arm)
    m = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [m, m, m]
    alone = compute is not None and network is not None

    def mean(key: str) -> float:
        return statistics.fmean(turn[key] for turn in arm["turns"])

    return Row(
        name,
        m,
        (quartiles[2] - quartiles[0]) / m,
        mean("cpu_seconds"),
        mean("sent_bytes"),
        max(turn["peak_bytes"] for turn in arm["turns"]),
        arm.get("messages"),
        cell["facts"].get(arm["process"], {}).get("first_step_seconds"),
        cell["hosts"] * cell["batch"] / m,
        compute / m if compute else None,
        (compute + network - m) / min(compute, network) if alone else None,
        m - compute if compute else None,
        m / max(compute, network) if alone else None,
    )
