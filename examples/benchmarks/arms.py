"""What is compared, as data. An arm is one way of exchanging gradients; arms of one process form a party."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TORCH = Path(__file__).parents[2] / ".venv-torch" / "bin" / "python"
MB = 2**20
FUSIONS, CYCLES, GROUPS = (128, 32, 8, 1), (1.0, 0.5, 5.0), (0, 1, 8)  # MB, ms, of plain Horovod's tuning
POLICIES = ("fifo,none", "fifo,fixed:8MB", "fifo,mgwfbp", "tac,mgwfbp", "caramel,mgwfbp")


@dataclass(frozen=True)
class Arm:
    """name: in the results.  party: whose program runs it.  told: with `measure` and `count`.
    horovod: settings of Horovod that it needs and that another hvd.init() can change.
    env, steps_per_execution: of the process, so arms that differ in them are not in one.
    """

    name: str
    party: str
    told: Mapping[str, Any]
    horovod: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    steps_per_execution: int = 1

    @property
    def process(self) -> str:
        """Arms with the same one share their processes."""
        own = [f"{key}={value}" for key, value in sorted(self.env.items())]
        if self.steps_per_execution > 1:
            own.append(f"steps_per_execution={self.steps_per_execution}")
        return " ".join([self.party, *own])


@dataclass(frozen=True)
class Program:
    """module: in `programs`.  env: of its processes.  python: that runs them.  quiet: need not be stopped."""

    module: str
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    quiet: bool = False


# Ranks that are stopped for minutes must not take each other for dead.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "100000"}
PROGRAMS = {
    "horovod": Program("plain", _PATIENT),
    "caramel": Program(
        "caramel", _PATIENT | {"TF_CARAMEL": "1", "TF_CARAMEL_CACHE": "off", "TF_CARAMEL_TIMEOUT": "120"}
    ),
    "mwms": Program("mirrored", quiet=True),
    "ddp": Program("ddp", python=str(TORCH), quiet=True),
}


def horovod(name: str, fusion_mb: float = 128, cycle_ms: float = 1.0, groups: int = 0) -> Arm:
    """By default as it comes. Another cycle time needs a process of its own, see `programs.again`."""
    settings = {"HOROVOD_FUSION_THRESHOLD": str(round(fusion_mb * MB))}
    told = {"exchange": str(groups)}
    if cycle_ms == 1:
        return Arm(name, "horovod", told, settings)
    return Arm(name, "horovod", told, env=settings | {"HOROVOD_CYCLE_TIME": f"{cycle_ms:g}"})


LOCAL = Arm("compute alone", "horovod", {"exchange": "local"})
NETWORK = Arm("network alone", "horovod", {"exchange": "network"}, {"HOROVOD_FUSION_THRESHOLD": str(1024 * MB)})
AS_IT_COMES = horovod("Horovod")
UNFUSED = horovod("Horovod, no fusion", fusion_mb=0)


def policy(text: str) -> Arm:
    return Arm(f"tf_caramel {text}", "caramel", {"policy": text})


TRACED, STATIC, MEASURED, DEFERRED, LOOSE = map(policy, ("traced", "static", "measured", "deferred", "loose"))
WITHIN = tuple(
    replace(arm, name=f"{arm.name} within calls of 4 steps", env={"TF_CARAMEL_DEFER": "within"}, steps_per_execution=4)
    for arm in (DEFERRED, LOOSE)
)
PRODUCT = (DEFERRED, LOOSE, MEASURED, STATIC, TRACED)  # what the product judges among; the fastest is what runs
MWMS = Arm("MultiWorkerMirrored", "mwms", {"pack_mb": 0})
PACKS = tuple(Arm(f"MultiWorkerMirrored, {mb} MB", "mwms", {"pack_mb": mb}) for mb in (8, 32))
DDP = Arm("PyTorch DDP (another framework)", "ddp", {})


AUTOTUNED = Arm(
    "Horovod, autotune",
    "horovod",
    {"exchange": "0"},
    env={
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "/tmp/caramel-autotune.csv",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "3",
    },
)


def tuned(cycle_ms: float, fusions: Sequence[float] = FUSIONS) -> list[Arm]:
    """The cells of plain Horovod's tuning with one cycle time."""
    return [
        horovod(f"Horovod {fusion:g} MB, {cycle_ms:g} ms, groups {groups or 'none'}", fusion, cycle_ms, groups)
        for fusion in fusions
        for groups in GROUPS
    ]


def fixed(parties: Sequence[str], policies: Sequence[str], within: bool = False) -> list[Arm]:
    """The arms that need no tuning first, of these parties.  within: also those that defer within calls."""
    arms = [
        LOCAL,
        NETWORK,
        AS_IT_COMES,
        UNFUSED,
        *PRODUCT,
        *(policy(p) for p in policies),
        *(WITHIN if within else ()),
        MWMS,
        *PACKS,
        DDP,
    ]
    return [arm for arm in arms if arm.party in parties]
