"""What was to be reached, what was, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from examples.benchmarks import arms
from examples.benchmarks.figures import PRODUCT, TUNED, Figures

SMALL_TENSORS = ("mobilenet", "densenet")
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """PRODUCT is to be `least` times as fast as `other` in the cells that `where` picks."""

    text: str
    least: float
    other: str
    where: Callable[[Cell, Figures], bool]


@dataclass(frozen=True)
class Verdict:
    text: str
    measured: str
    verdict: str
    why: str


def _link_is_the_limit(cell: Cell, f: Figures) -> bool:
    return not cell.get("accelerator") and bool(f.network and f.compute and f.network > f.compute)


def _resnet_at_a_gigabit(cell: Cell, _: Figures) -> bool:
    return cell["model"] == "resnet50" and cell["mbit"] == 1000 and not cell.get("accelerator") and cell["hosts"] == 2


def _small(cell: Cell, _: Figures) -> bool:
    return cell["model"] in SMALL_TENSORS and not cell.get("accelerator")


TARGETS = (
    Target("never below best-tuned Horovod", 0.98, TUNED, lambda cell, _: True),
    Target(
        "over best-tuned Horovod, accelerator, compute = communication",
        1.25,
        TUNED,
        lambda c, _: c.get("accelerator") == 1,
    ),
    Target("over best-tuned Horovod, real compute, the link is the limit", 1.15, TUNED, _link_is_the_limit),
    Target("over unfused Horovod, ResNet50 at 1 Gbit/s", 1.7, arms.UNFUSED.name, _resnet_at_a_gigabit),
    Target("over MultiWorkerMirrored as it comes, ResNet50 at 1 Gbit/s", 1.7, arms.MWMS.name, _resnet_at_a_gigabit),
    Target("over unfused Horovod, many small tensors", 2.0, arms.UNFUSED.name, _small),
    Target("over MultiWorkerMirrored as it comes, many small tensors", 2.0, arms.MWMS.name, _small),
)


def reached(cells: Mapping[str, Cell], seen: Mapping[str, Figures]) -> list[Verdict]:
    return [_verdict(target, cells, seen) for target in TARGETS]


def _verdict(target: Target, cells: Mapping[str, Cell], seen: Mapping[str, Figures]) -> Verdict:
    text = f"{target.least:g}x {target.text}"
    times = {
        key: ratio
        for key, cell in cells.items()
        if cell["emulated"]
        and target.where(cell, seen[key])
        and (ratio := seen[key].times(PRODUCT, target.other)) is not None
    }
    if not times:
        return Verdict(text, "-", "not measured", "no such cell in this run")
    missed = {key: ratio for key, ratio in times.items() if ratio < target.least}
    measured = f"{min(times.values()):.2f} to {max(times.values()):.2f} in {len(times)} cells"
    if not missed:
        return Verdict(text, measured, "yes", "")
    verdict = f"no: {len(times) - len(missed)} of {len(times)}"
    return Verdict(text, measured, verdict, "; ".join(_why(key, cells[key], seen[key], target) for key in missed))


def _why(key: str, cell: Cell, f: Figures, target: Target) -> str:
    """A bound that forbids it, or what is still exposed."""
    ratio, bound = f.times(PRODUCT, target.other), f.bound_with_cpu
    said = f"{cell['model']} at {cell['mbit']:g}: {ratio:.2f}"
    if bound is None:
        return said
    possible = f.rows[target.other].seconds / bound
    if possible < target.least:
        return (
            f"{said}, and no more than {possible:.2f} is possible, for {target.other} is that near the bound with CPU"
        )
    mine = f.rows[PRODUCT]
    spread = max(mine.spread, f.rows[target.other].spread)
    above = 1e3 * (mine.seconds - bound)
    return f"{said}, where {possible:.2f} is possible; {above:.0f} ms above the bound with CPU, spread {spread:.0%}"
