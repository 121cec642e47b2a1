"""Ends calls that wait for a rank which has left: training there failed, and it will not come back.

A rank that leaves training with an exception says so in the launcher's store. A thread looks there only while a call of
ours has been running for long; then it shuts Horovod down, so that the call fails, and its error names the rank.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from types import TracebackType
from typing import Any

import horovod.tensorflow as hvd

from tf_caramel.runtime import ranks

log = logging.getLogger("tf_caramel")
POLL_SECONDS = 1.0
PATIENCE = 0.5  # of the time limit: so long a rank may take to try again before it is given up
_LAST_SECONDS = 10.0  # a call that does not even end when Horovod is shut down is ended with the process
_running: dict[int, Watch] = {}
_numbers = itertools.count()
_thread: threading.Thread | None = None


class Watch:
    """Around a call that may wait for other ranks. Raises AgreementError in place of Horovod's error if one has left,
    or if the call takes longer than `limit_seconds`.
    """

    def __init__(self, timeout_seconds: float, limit_seconds: float | None = None) -> None:
        self.timeout_seconds, self.limit_seconds = timeout_seconds, limit_seconds
        self.ended: str | None = None  # why it was made to fail
        self.began = 0.0
        self.number = next(_numbers)

    def __enter__(self) -> Watch:
        _start()
        ranks.back()
        self.began = time.monotonic()
        _running[self.number] = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        _running.pop(self.number, None)
        if not isinstance(error, Exception) or isinstance(error, ranks.AgreementError):
            return
        reason = self.ended or (_who_left() if "Horovod has been shut down" in str(error) else None)
        if reason:
            raise ranks.fatal(reason) from error

    def look(self) -> str | None:
        """Why it has to be ended now; None if it may go on."""
        seconds = time.monotonic() - self.began
        if self.limit_seconds is not None and seconds > self.limit_seconds:
            return f"the other ranks did not come to apply the last updates within {self.limit_seconds:g} s"
        return _who_left() if seconds > PATIENCE * self.timeout_seconds else None


def _who_left() -> str | None:
    left = {rank: why for rank, why in ranks.left().items() if rank != ranks.here()[0]}
    if not left:
        return None
    rank = min(left)
    others = f" (so did {', '.join(str(r) for r in sorted(left) if r != rank)})" if len(left) > 1 else ""
    return f"rank {rank} left training with {left[rank]}{others}; this rank cannot go on without it"


def _start() -> None:
    global _thread
    if _thread is None:
        ranks.here()
        _thread = threading.Thread(target=_watch, name="tf_caramel watchdog", daemon=True)
        _thread.start()


def _watch() -> None:
    while True:
        time.sleep(POLL_SECONDS)
        for watch in list(_running.values()):
            if watch.ended is None and (reason := watch.look()):
                watch.ended = reason
                threading.Thread(target=_end, args=(watch,), name="tf_caramel end", daemon=True).start()


def _end(watch: Watch) -> None:
    log.error("tf_caramel, rank %d: %s", ranks.here()[0], watch.ended)
    threading.Thread(target=hvd.shutdown, daemon=True).start()  # outstanding collectives fail then, on all ranks
    time.sleep(_LAST_SECONDS)
    if watch.number in _running:
        log.critical("tf_caramel: the call does not end although Horovod is shut down; this process ends itself")
        os._exit(1)
