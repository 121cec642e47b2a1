"""Which cells a run measures, in which order, and where their results go: after each cell everything is written."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from examples.benchmarks import arms, hosts, measure, scale
from examples.benchmarks.picture import draw
from examples.benchmarks.tables import markdown

FORMAT = "tf_caramel benchmark 1"
BALANCE = "balance"
ACCELERATOR_MBIT = 250  # the link of these cells: so slow that this machine's cores do not count


@dataclass(frozen=True)
class Grid:
    """mbit: of the links, or BALANCE: where the model's computing and its communication take equally long.
    batch: on each host; None: the model's own.  scale: numbers of ranks to simulate.
    accelerator: seconds of computing over seconds of communication, each a cell with an emulated accelerator.
    """

    models: tuple[str, ...]
    mbit: tuple[float | str, ...]
    hosts: tuple[int, ...] = (2,)
    accelerator: tuple[float, ...] = ()
    parties: tuple[str, ...] = tuple(arms.PROGRAMS)
    policies: tuple[str, ...] = arms.POLICIES
    effort: measure.Effort = field(default_factory=measure.Effort)
    batch: int | None = None
    loopback: bool = False
    scale: tuple[int, ...] = scale.RANKS

    def cells(self) -> int:
        return len(self.models) * len(self.hosts) * (len(self.mbit) + len(self.accelerator))


@dataclass
class Output:
    """folder: gets results.json, results.md and results.png, and each cell's profile, for `caramel simulate`.
    results: what the tables and the picture are made of.
    """

    folder: Path
    results: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, command: str, add: bool) -> Output:
        """add: to what is in the folder; a cell that is measured again replaces the one before."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "results.json"
        results: dict[str, Any] = {"format": FORMAT, "commands": [], "skipped": [], "cells": {}}
        if add and file.exists():
            results = json.loads(file.read_text())
        if command:
            results["commands"].append(command)
            results |= {"machine": machine(), "date": f"{datetime.date.today()}"}
        return cls(folder, results)

    def add(self, cell: dict[str, Any]) -> None:
        link = BALANCE if cell["balance"] else cell["mbit"]
        key = " ".join(map(str, (cell["model"], cell["hosts"], link, cell["accelerator"], cell["emulated"])))
        for process, told in cell["planning"].items():
            if "profile" in told:
                self._keep(f"{key} {process}", told.pop("profile"))
        self.results["cells"][key] = cell
        self.write()

    def _keep(self, name: str, profile: str) -> None:
        folder = self.folder / "profiles"
        folder.mkdir(exist_ok=True)
        (folder / f"{name.replace(' ', '-')}.json").write_text(profile)

    def write(self) -> None:
        new = self.folder / "results.json.new"
        new.write_text(json.dumps(self.results))
        new.replace(self.folder / "results.json")
        self.render()

    def render(self) -> None:
        (self.folder / "results.md").write_text(markdown(self.results))
        draw(self.results, self.folder / "results.png")


def machine() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return f"{os.cpu_count()} cores of {cpu or platform.machine()}, Linux {platform.release().split('-')[0]}"


def run(grid: Grid, output: Output, say: Callable[[str], None]) -> None:
    """Measures every cell. Raises HostsError and PartyError; whatever was measured before is written.

    More hosts than cores need quotas: where those cannot be had, these cells are skipped, and the tables say why.
    """
    if not hosts.why_not():
        hosts.sweep()
    with tempfile.TemporaryDirectory(prefix="caramel-bench-") as name:
        for count in grid.hosts:
            try:
                with _ground(grid, count) as ground:
                    for model in grid.models:
                        Model(_affordable(grid, count), model, ground, output, Path(name), say).run()
            except hosts.QuotaError as reason:
                output.results["skipped"].append(f"{count} hosts: {reason}")
                output.write()


def _affordable(grid: Grid, count: int) -> Grid:
    """On many hosts: without those parties of plain Horovod that need processes of their own, for memory's sake."""
    return replace(grid, effort=replace(grid.effort, cycles=False, autotune_seconds=0)) if count > 2 else grid


@contextlib.contextmanager
def _ground(grid: Grid, count: int) -> Iterator[hosts.Ground]:
    if grid.loopback:
        yield hosts.Loopback.of(count)
        return
    with hosts.ground(count, 1000) as ground:
        yield ground


@dataclass
class Model:
    """All cells of one model on one ground."""

    grid: Grid
    model: str
    ground: hosts.Ground
    output: Output
    folder: Path
    say: Callable[[str], None]

    def run(self) -> None:
        """Real computing on every link, then the emulated accelerators, held to what the network alone takes."""
        speeds = self._speeds() if self.ground.emulated else [(0.0, False)]
        if self.grid.mbit:
            with self._bench(self._arms()) as bench:
                for mbit, balance in speeds:
                    self._cell(bench, self._balance(bench) if mbit < 0 else mbit, balance, None)
        if self.grid.accelerator:
            with self._bench([arms.NETWORK], ACCELERATOR_MBIT) as bench:
                alone = statistics.median(bench.turn(arms.NETWORK, 3)["seconds"])
            for ratio in self.grid.accelerator:
                with self._bench(self._arms("ddp"), ACCELERATOR_MBIT, ratio * alone) as bench:  # ddp computes itself
                    self._cell(bench, ACCELERATOR_MBIT, False, ratio)

    def _arms(self, but: str = "") -> list[arms.Arm]:
        parties = [party for party in self.grid.parties if party != but]
        return arms.fixed(parties, self.grid.policies, self.grid.effort.within)

    def _speeds(self) -> list[tuple[float, bool]]:
        """(Mbit/s, is it the balance); -1 for one that has to be found first."""
        return [(-1.0, True) if m == BALANCE else (float(m), False) for m in self.grid.mbit]

    @contextlib.contextmanager
    def _bench(
        self, first: Sequence[arms.Arm], mbit: float = 1000.0, seconds: float | None = None
    ) -> Iterator[measure.Bench]:
        """The processes of the arms.  seconds: of the emulated accelerator's computing, None for real computing."""
        self.ground.shape(mbit)
        spec = {"model": self.model, "batch": self.grid.batch, "accelerator": seconds}
        bench = measure.Bench(self.ground, spec, self.folder, lambda text: self.say(f"{self.model}: {text}"))
        try:
            bench.launch(first)
            yield bench
        finally:
            bench.close()

    def _cell(self, bench: measure.Bench, mbit: float, balance: bool, ratio: float | None) -> None:
        began = time.perf_counter()
        self.ground.shape(mbit)
        cell = measure.cell(bench, self.grid.effort, self.grid.policies, self.grid.parties)
        cell |= {
            "model": self.model,
            **{key: next(iter(bench.facts.values()))[key] for key in ("batch", "description", "gradient_bytes")},
            "hosts": len(self.ground.addresses),
            "ground": str(self.ground),
            "emulated": self.ground.emulated,
            "mbit": mbit,
            "balance": balance,
            "accelerator": ratio,
            "took_seconds": time.perf_counter() - began,
        }
        if ratio is None and self.ground.emulated:
            self.say(f"{self.model}: simulating more ranks")
            cell["simulated"] = scale.scaled(cell, self.grid.scale)
        self.output.add(cell)

    def _balance(self, bench: measure.Bench) -> float:
        """The link speed, in Mbit/s, at which the network alone takes as long as computing alone: two digits of it,
        within 50 and 10,000. Each try takes the network's time to be that of the one before, scaled with the speed.
        """
        tried = 1000.0
        compute = min(bench.turn(arms.LOCAL, 3)["seconds"])
        for _ in range(3):
            self.ground.shape(tried)
            network = min(bench.turn(arms.NETWORK, 2)["seconds"])
            tried = min(10_000.0, max(50.0, float(f"{tried * network / compute:.2g}")))
        return tried
