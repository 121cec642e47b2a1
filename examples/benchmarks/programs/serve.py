"""What all programs share: they answer the coordinator's commands, and measure the turns that they are told to run.

A command is a JSON object a line on stdin, {"do": name, ...}; the answer, {"ok": ...} or {"error": text}, goes to the
stdout that the process began with. Whatever else is printed goes to stderr, which is the rank's log.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MIB = 2**20


class Clock:
    """Stands in for a function that runs `steps` steps, and keeps when its calls began and ended."""

    def __init__(self, function: Callable[..., Any], steps: int = 1) -> None:
        self.function, self.steps = function, steps
        self.began: list[float] = []
        self.ended: list[float] = []

    def __call__(self, *args: Any) -> Any:
        self.began.append(time.perf_counter())
        result = self.function(*args)
        self.ended.append(time.perf_counter())
        return result

    def seconds(self) -> list[float]:
        """Of a step, for each call: from its begin to the next one's, the last to its own end."""
        until = [*self.began[1:], self.ended[-1]]
        return [(end - begin) / self.steps for begin, end in zip(self.began, until, strict=True)]


class Meter:
    """CPU seconds of this process, bytes its host sent, and the most memory it held since this was made."""

    def __init__(self, interface: str) -> None:
        self.sent = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        Path("/proc/self/clear_refs").write_text("5")
        self.cpu, self.bytes_ = self._cpu(), self._bytes()

    def _cpu(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def _bytes(self) -> int:
        return int(self.sent.read_text())

    def read(self) -> dict[str, float]:
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
        peak = int(status.split()[0]) * 1024
        return {"cpu_seconds": self._cpu() - self.cpu, "sent_bytes": self._bytes() - self.bytes_, "peak_bytes": peak}


def turn(run: Callable[[int], Clock], steps: int, warm: int, interface: str, drop_last: bool = False) -> dict[str, Any]:
    """One turn: `warm` calls that are not counted and as many as make `steps`. Times and sums are those of a step.

    drop_last: the last call is not counted either, for what it leaves to the next one was not done in it.
    """
    meter = Meter(interface)
    began = time.perf_counter()
    calls = warm + steps + drop_last
    clock = run(calls)
    total = time.perf_counter() - began
    used = meter.read()
    seconds = clock.seconds()
    count = len(seconds) * clock.steps
    return {
        "seconds": seconds[warm : warm + steps],
        "whole_seconds": total / count,
        "cpu_seconds": used["cpu_seconds"] / count,
        "turn_cpu_seconds": used["cpu_seconds"],
        "sent_bytes": used["sent_bytes"] / count,
        "peak_bytes": used["peak_bytes"],
    }


def serve(make: Callable[[dict[str, Any]], Mapping[str, Callable[..., Any]]]) -> None:
    """Answers commands until the coordinator is gone. make: from the spec (first argument) to what can be done."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    handlers: Mapping[str, Callable[..., Any]] = {}
    problem = ""
    try:
        handlers = make(json.loads(sys.argv[1]))
    except BaseException as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    while True:
        command = json.loads(commands.get())
        try:
            if problem:
                raise RuntimeError(problem)
            answer = {"ok": handlers[command.pop("do")](**command)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _read(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)  # also out of a collective that waits for ever
