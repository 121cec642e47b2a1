"""What all programs share: they answer the coordinator's commands, and measure the turns that they are told to run.

A command is a JSON object a line on stdin, {"do": name, ...}; the answer, {"ok": ...} or {"error": text}, goes to the
stdout that the process began with. Whatever else is printed goes to stderr, which is the rank's log.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any


class Clock:
    """Stands in for a function that runs `steps` steps, and keeps when its calls began and ended, and the CPU seconds
    that the process had used by then.
    """

    def __init__(self, function: Callable[..., Any], steps: int = 1) -> None:
        self.function, self.steps = function, steps
        self.began: list[float] = []
        self.cpu: list[float] = []
        self.ended: tuple[float, float] = (0.0, 0.0)

    def __call__(self, *args: Any) -> Any:
        self.cpu.append(time.process_time())
        self.began.append(time.perf_counter())
        result = self.function(*args)
        self.ended = time.perf_counter(), time.process_time()
        return result

    def seconds(self) -> list[float]:
        """Of a step, for each call: from its begin to the next one's, the last to its own end."""
        return self._each([*self.began, self.ended[0]])

    def cpu_seconds(self) -> list[float]:
        return self._each([*self.cpu, self.ended[1]])

    def _each(self, marks: list[float]) -> list[float]:
        return [(end - begin) / self.steps for begin, end in pairwise(marks)]


def turn(run: Callable[[int], Clock], steps: int, warm: int, interface: str) -> dict[str, Any]:
    """One turn: `warm` calls that are not counted, then as many as `steps`. All figures are those of a step.

    whole_seconds: of the whole turn, with what `fit` does before and after, over all its steps.
    """
    sent = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this turn
    before, cpu, began = int(sent.read_text()), time.process_time(), time.perf_counter()
    clock = run(warm + steps)
    total, cpu, sent_bytes = time.perf_counter() - began, time.process_time() - cpu, int(sent.read_text()) - before
    count = len(clock.began) * clock.steps
    return {
        "seconds": clock.seconds()[warm : warm + steps],
        "cpu_seconds": statistics.fmean(clock.cpu_seconds()[warm : warm + steps]),
        "whole_seconds": total / count,
        "turn_cpu_seconds": cpu,
        "sent_bytes": sent_bytes / count,
        "peak_bytes": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024,
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
            answer = {"error": problem} if problem else {"ok": handlers[command.pop("do")](**command)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _read(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)  # also out of a collective that waits for ever
