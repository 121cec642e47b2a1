"""Horovod initialised again with other settings, within the process; and the messages of a step, by its timeline.

The fusion threshold and the timeline are read at hvd.init(). What Horovod 0.28.1 is not up to:
- HOROVOD_TIMELINE=DYNAMIC, without which a timeline cannot be started later, makes a thread that spins on the core all
  the time: only turns that are not timed have it.
- Its parameter manager outlives hvd.shutdown(). A fusion threshold that was set stays set when the variable is gone, so
  it is always given; a cycle time that was set breaks the fusion threshold of the next hvd.init(), and both together
  end it with a segmentation fault: another cycle time, and autotuning, need a process of their own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd

SETTINGS = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE")


def init(port: int, environment: dict[str, str]) -> None:
    """With these settings and no others, through a fresh rendezvous on `port`. All functions traced before work on."""
    hvd.shutdown()
    for name in SETTINGS:
        os.environ.pop(name, None)
    os.environ.update(environment, HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))
    hvd.init()


def messages(run: Callable[[int], Any], steps: int, warm: int = 1) -> float | None:
    """run: takes a number of steps. None on all ranks but the first, which Horovod writes the timeline on."""
    run(warm)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        hvd.start_timeline(str(path))
        run(steps)
        hvd.stop_timeline()
        return count(path.read_text()) / steps if hvd.rank() == 0 else None


def count(timeline: str) -> int:
    """All-reduces that Horovod performed: how often its one communication thread went from idle to busy."""
    open_events = found = 0
    stacks: dict[int, list[str]] = {}
    for event in json.loads(timeline.rstrip().rstrip(",").rstrip("]") + "]"):
        stack = stacks.setdefault(event.get("pid", -1), [])
        if event.get("ph") == "B":
            stack.append(event["name"])
            if event["name"] == "GLOO_ALLREDUCE":
                found += open_events == 0
                open_events += 1
        elif event.get("ph") == "E" and stack and stack.pop() == "GLOO_ALLREDUCE":
            open_events -= 1
    return found
