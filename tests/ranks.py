"""Starts real Horovod ranks for a test: one process a rank, each with a log of its own, a wall limit on all.

Processes are ended by their handles only. A rank's script reports with `tests.report.put(name, value)`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from examples.benchmarks.hosts import rank_environment

ROOT = Path(__file__).parents[1]
WORKERS = Path(__file__).parent / "horovod" / "workers"
MARK = "REPORT "


@dataclass(frozen=True)
class Rank:
    """How one rank ended. code: exit code, None if the wall limit ended it.  seconds: it ran."""

    code: int | None
    log: str
    seconds: float

    @property
    def report(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for line in self.log.splitlines():
            if line.startswith(MARK):
                out.update(json.loads(line[len(MARK) :]))
        return out

    def of(self, case: str) -> dict[str, Any]:
        """The part of the report that one case of workers/cases.py made."""
        return {k.removeprefix(case + "/"): v for k, v in self.report.items() if k.startswith(case + "/")}


def start(
    script: str,
    *arguments: str,
    n: int = 2,
    env: Mapping[str, str] | None = None,
    per_rank: Sequence[Mapping[str, str]] = (),
    limit_seconds: float = 150.0,
    folder: Path,
) -> list[Rank]:
    """Runs tests/horovod/workers/<script> on n ranks and waits for all. env: for all; per_rank: for each, on top."""
    assignments = get_host_assignments(parse_hosts(f"localhost:{n}"), n)
    server = RendezvousServer(0)
    port = server.start()
    server.init(assignments)
    began = time.monotonic()
    processes = []
    try:
        for slot in assignments:
            own = {k: v for k, v in os.environ.items() if not k.startswith(("TF_CARAMEL", "HOROVOD_"))}
            own |= {
                **rank_environment(slot, "127.0.0.1", port, "lo"),
                "PYTHONPATH": str(ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "OMP_NUM_THREADS": "1",
                "TF_CARAMEL_CACHE": "off",
                **(env or {}),
                **(per_rank[slot.rank] if per_rank else {}),
            }
            path = folder / f"{script}-{slot.rank}-{time.monotonic_ns()}.log"
            with path.open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, "-u", str(WORKERS / script), *arguments],
                    env=own,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                )
            processes.append((process, path))
        ended: dict[int, float] = {}
        while len(ended) < n and time.monotonic() - began < limit_seconds:
            for rank, (process, _) in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - began
            time.sleep(0.05)
        return [
            Rank(process.poll(), path.read_text(errors="replace"), ended.get(rank, limit_seconds))
            for rank, (process, path) in enumerate(processes)
        ]
    finally:
        for process, _ in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        server.stop()


def reports(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Every rank's report; fails with the logs unless all ranks ended well."""
    tails = "\n".join(f"--- rank {i}, exit {r.code}\n{r.log[-3000:]}" for i, r in enumerate(ranks))
    assert all(r.code == 0 for r in ranks), tails
    return [r.report for r in ranks]
