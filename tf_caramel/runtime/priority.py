"""Lets Horovod's threads go first: a real-time priority, while a plan runs, where the system allows it.

Where computing keeps all cores busy, a thread that has to pass a message on waits until the scheduler gives it a turn,
and the link idles as long. That is what a plan loses to its own simulation, which has the link work on.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import horovod.tensorflow as hvd

log = logging.getLogger("tf_caramel")

LOOK_SECONDS = 0.2
OFTEN = 0.25  # of Horovod's cycles, that a thread of its wakes in
LEAST_CYCLE_SECONDS = 5e-4  # at shorter ones its threads hardly sleep, and would keep the others from working
AT_MOST = 8  # more threads than that are not Horovod's: each process set has two
TASKS = Path("/proc/self/task")
NOT_ALLOWED = (
    "Horovod's threads wait for computing to leave them a core: they may not go first here (`docker run --cap-add "
    "SYS_NICE` allows it, or a limit of 1 for rtprio, see ulimit -r)"
)


class Priority:
    """Of this process.  wanted: else nothing is ever changed.  threads: Horovod's; None: not looked for yet.
    first: they go first.  obstacle: why they never will, although it is wanted.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.threads: list[int] | None = None
        self.first = False
        self.obstacle: str | None = None

    def let(self, first: bool) -> None:
        """Horovod's threads go first from now on, or like all others. Cheap if they do so already."""
        if not self.wanted or self.obstacle:
            return
        if not self._there():
            self.threads, self.first = None, False
        if first == self.first:
            return
        found = self.threads is not None
        if not found:
            self.threads, self.obstacle = find()
        self.first = first
        try:
            for thread in self.threads or ():
                _schedule(thread, first)
        except OSError as error:
            self.obstacle = f"Horovod's threads do not go first: {error}"
        if not found and not self.obstacle:
            log.info("tf_caramel: Horovod's threads go before computing (SCHED_FIFO) while a judged plan runs")

    def _there(self) -> bool:
        """Do those that were found still run? They do not if Horovod was initialised anew."""
        try:
            for thread in self.threads or ():
                os.sched_getscheduler(thread)
        except ProcessLookupError:
            return False
        return True


def _schedule(thread: int, first: bool) -> None:
    """Threads that it starts never go first; to take that back takes more permission than to do it."""
    policy, priority = (os.SCHED_FIFO, 1) if first else (os.SCHED_OTHER, 0)
    os.sched_setscheduler(thread, policy | os.SCHED_RESET_ON_FORK, os.sched_param(priority))


def obstacle() -> str | None:
    """Why Horovod's threads cannot go first on this machine, with this Horovod, as this user; None if they can."""
    if not TASKS.is_dir():
        return "Horovod's threads can go first on Linux only"
    if hvd.mpi_built() or hvd.nccl_built() or hvd.ccl_built() or not hvd.gloo_built():
        return "Horovod's threads go first with nothing but Gloo built in: others may wait without sleeping"
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return NOT_ALLOWED
    os.sched_setscheduler(0, *before)
    return None


def find() -> tuple[list[int], str | None]:
    """Horovod's threads, or why they are to be left alone.

    They have no names, but while nothing is to be done they alone wake in each of Horovod's cycles: one looks for what
    is ready, the other hears of it from the other ranks.
    """
    reason = obstacle()
    if reason:
        return [], reason
    cycle = _cycle_seconds()
    if cycle < LEAST_CYCLE_SECONDS:
        return [], f"HOROVOD_CYCLE_TIME is {1e3 * cycle:g} ms: Horovod's threads hardly sleep, so they do not go first"
    seconds = max(LOOK_SECONDS, 20 * cycle)
    before = _wakes()
    time.sleep(seconds)
    after = _wakes()
    least = OFTEN * seconds / cycle
    found = sorted(t for t in after if t in before and after[t] - before[t] >= least and t != os.getpid())
    ordinary = [t for t in found if os.sched_getscheduler(t) == os.SCHED_OTHER]
    if not ordinary or len(found) > AT_MOST:
        return [], f"Horovod's threads do not go first: of {len(after)} threads, {len(found)} look like Horovod's"
    return ordinary, None


def _cycle_seconds() -> float:
    try:
        return float(os.environ.get("HOROVOD_CYCLE_TIME") or 1) * 1e-3
    except ValueError:
        return 1e-3


def _wakes() -> dict[int, int]:
    """thread -> how often it has gone to sleep."""
    found = {}
    for task in TASKS.iterdir():
        try:
            text = (task / "status").read_text()
        except OSError:  # it has ended
            continue
        found[int(task.name)] = int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return found
