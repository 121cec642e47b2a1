"""A party: the processes of one competitor's program, one rank on each host, that measure what they are told to.

The coordinator talks to each rank through its stdin and stdout, one JSON object a line. Only one party runs at a time:
the others are stopped (SIGSTOP), for Horovod's background threads would go on polling the link. Every process is a
group of its own, ended by its handle, and dies with the coordinator.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

from examples.benchmarks.hosts import Ground, rank_environment

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300.0  # for one command
TAIL = 1500  # characters of a rank's log that an error shows
_libc = ctypes.CDLL(None)


class PartyError(RuntimeError):
    """A rank failed or did not answer in time; the text says which and how its log ends."""


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also of a stopped process whose coordinator is killed


def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process in a group of its own that talks through pipes and dies with this one."""
    with log.open("ab") as stderr:
        return subprocess.Popen(
            command,
            env=dict(env),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


class Rendezvous:
    """Horovod's rendezvous for a party, on host 0."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        command = [sys.executable, "-m", "examples.benchmarks.rendezvous", *ground.addresses]
        self.process = start(ground.command(0, command), _environment(), folder / "rendezvous.log")

    def port(self) -> int:
        """Of a fresh server."""
        self.process.stdin.write(b"\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return int(self.process.stdout.readline())  # type: ignore[union-attr]


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_CARAMEL", "HOROVOD_", "TF_CONFIG"))}
    return kept | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}


def _free_port() -> int:
    """A TCP port where this and the next few are most likely free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Party:
    """program: module in `programs`.  spec: what its ranks are told at the start, plain data.  env: for its processes.
    python: that runs it.  started: when it was launched, as of time.perf_counter().
    quiet: it does nothing while it is not asked, so it is not stopped.
    """

    def __init__(
        self,
        name: str,
        program: str,
        ground: Ground,
        spec: Mapping[str, Any],
        folder: Path,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        quiet: bool = False,
    ) -> None:
        self.name, self.quiet, self.ground = name, quiet, ground
        self.folder = folder / name.replace(" ", "-").replace("/", "-")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.stopped = False
        self.rendezvous = Rendezvous(ground, self.folder)
        try:
            port, free = self.rendezvous.port(), _free_port()
            self.started = time.perf_counter()
            slots = get_host_assignments(
                parse_hosts(",".join(f"{a}:1" for a in ground.addresses)), len(ground.addresses)
            )
            for slot in slots:
                told = dict(spec) | {
                    "rank": slot.rank,
                    "addresses": ground.addresses,
                    "interface": ground.interface,
                    "port": free,
                }
                command = [python, "-m", f"examples.benchmarks.programs.{program}", json.dumps(told)]
                own = _environment() | rank_environment(slot, ground.addresses[0], port, ground.interface)
                log = self.folder / f"rank{slot.rank}.log"
                rank = start(ground.command(slot.rank, command), own | dict(env or {}), log)
                self.ranks.append(rank)
                ground.confine(slot.rank, rank.pid)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, limit_seconds: float = LIMIT_SECONDS, **arguments: Any) -> list[Any]:
        """Every rank's answer. Raises PartyError."""
        self.go_on()
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        for number, rank in enumerate(self.ranks):
            try:
                rank.stdin.write(line)  # type: ignore[union-attr]
                rank.stdin.flush()  # type: ignore[union-attr]
            except OSError:
                self._failed(number, f"it had ended before it was told to {do}")
        return self._answers(do, time.monotonic() + limit_seconds)

    def _answers(self, do: str, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        heard: dict[int, bytes] = dict.fromkeys(range(len(self.ranks)), b"")
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self.ranks):
                selector.register(rank.stdout, selectors.EVENT_READ, number)  # type: ignore[arg-type]
            while len(answers) < len(self.ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = next(n for n in heard if n not in answers)
                    self._failed(late, f"no answer to {do!r} in time")
                for key, _ in ready:
                    number = key.data
                    piece = os.read(key.fd, 1 << 20)
                    if not piece:
                        code = self.ranks[number].wait()
                        self._failed(number, f"it ended with exit code {code} while it was to {do}")
                    heard[number] += piece
                    if heard[number].endswith(b"\n"):
                        selector.unregister(key.fileobj)
                        answer = json.loads(heard[number])
                        if "error" in answer:
                            self._failed(number, answer["error"])
                        answers[number] = answer["ok"]
        return [answers[n] for n in range(len(self.ranks))]

    def _failed(self, number: int, why: str) -> NoReturn:
        log = (self.folder / f"rank{number}.log").read_text(errors="replace").strip()
        raise PartyError(f"{self.name}, rank {number}: {why}\n{log[-TAIL:]}")

    def rest(self) -> None:
        """Stops the ranks until they are asked again."""
        if not self.quiet and not self.stopped:
            self._signal(signal.SIGSTOP)
            self.stopped = True

    def go_on(self) -> None:
        if self.stopped:
            self._signal(signal.SIGCONT)
            self.stopped = False

    def _signal(self, number: int) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, number)

    def close(self) -> None:
        for process in (*self.ranks, self.rendezvous.process):
            end(process)
