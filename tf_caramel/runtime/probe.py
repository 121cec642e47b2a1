"""Measures the network with a few real all-reduces of different sizes: a + b*bytes, and what they cost computing.

A collective: all ranks call it at the same point, and all send the same messages. What is measured is what a batch of a
step pays: from the readiness of its gradients inside a tf.function to the readiness of the results.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from graph_passes import ops
from tf_caramel.planner.network import fit
from tf_caramel.planner.profile import Network

SIZES = (16 * 2**10, 128 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)  # bytes
BUDGET_SECONDS = 3.0  # of messages of these sizes under way
_MEMBERS = 4  # tensors in a message, so that packing is part of what is measured
_REPEATS = 5
_QUEUED_BYTES = 128 * 2**10
_CONTENDED_BYTES, _CONTENDED_SECONDS, _CONTENDED_ROUNDS = (16 * 2**10, 2 * 2**20), 0.12, 4


def cores() -> float:
    """Cores that this rank computes on: those it may run on, or what CPU quotas leave of them, shared by the host's
    ranks."""
    return min(len(os.sched_getaffinity(0)), quota()) / max(1, hvd.local_size())


def quota(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores' worth of time that this process's control groups (v1 and v2) and those above them allow; inf: no limit."""
    found = [math.inf]
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mounted / "cpu" if controllers else mounted
        inside = base / path.strip("/")
        for folder in [inside, *inside.parents]:  # in a container the path may be the host's, and not be there
            found.append(_quota_of(folder))
            if folder == base:
                break
    return min(found)


def _quota_of(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            given, period = (folder / "cpu.max").read_text().split()
        else:
            given, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if given in ("max", "-1") else int(given) / int(period)
    except (OSError, ValueError):
        return math.inf


def network() -> Network:
    """The network between the ranks, as this rank saw it; `merge` makes one of several."""
    samples: list[tuple[int, float]] = []
    left, repeats = BUDGET_SECONDS, _REPEATS
    for size in SIZES:
        if len(samples) > 2:  # what the link sustains shows in large messages only, so they have to fit in somehow
            likely = shared(samples[-1][1]) * size / samples[-1][0]
            repeats = min(_REPEATS, int(left / likely) - 1)
            if repeats < 2:
                break
        samples.append((size, _time(_message(size, f"{size}"), repeats)))
        left -= shared(samples[-1][1]) * (repeats + 1)
    a, b = fit(samples)
    # Messages that are ready together; of different dtypes, or Horovod would merge them.
    types = ("float32", "float64", "int32", "int64")
    one = _time(_message(_QUEUED_BYTES * len(types), "queued_at_once"))  # the same bytes in one message
    queued = (_time(_message(_QUEUED_BYTES, "queued", types)) - one) / (len(types) - 1)
    taken, stretch, busy = _contention()
    return Network(
        start_up_seconds=a,
        seconds_per_byte=b,
        queued_seconds=min(a, max(0.0, queued)),
        cpu_seconds_per_message=taken * cores() * a,
        cpu_seconds_per_byte=taken * cores() * b,
        copy_seconds_per_byte=_copy_seconds_per_byte(),
        stretch=stretch,
        busy_start_up_seconds=busy,
        ranks=hvd.size(),
        samples=tuple(samples),
    )


def merge(seen: list[Network]) -> Network:
    """What the ranks saw, as one: the mean of each number."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(n, name) for n in seen)

    samples = tuple(
        (rows[0][0], statistics.fmean(seconds for _, seconds in rows))
        for rows in zip(*(n.samples for n in seen), strict=True)
    )
    a, b = fit(samples)
    return Network(
        a,
        b,
        min(a, mean("queued_seconds")),
        mean("cpu_seconds_per_message"),
        mean("cpu_seconds_per_byte"),
        mean("copy_seconds_per_byte"),
        mean("stretch"),
        mean("busy_start_up_seconds"),
        seen[0].ranks,
        samples,
    )


def _contention() -> tuple[float, float, float]:
    """What communicating and computing cost each other: the fraction of computing that a message under way takes, how
    many times longer its bytes take then, and how many seconds longer its start-up takes.
    CPU time does not tell: the kernel's part, the caches and the scheduler are not in it.
    """
    small, large = (_message(size, f"contended_{size}") for size in _CONTENDED_BYTES)
    alone = [shared(_time(message)) for message in (small, large)]
    counts = [max(2, math.ceil(_CONTENDED_SECONDS / seconds)) for seconds in alone]
    x, kernel = tf.ones([4, 16, 16, 64]), tf.ones([3, 3, 64, 64])

    @tf.function(autograph=False)
    def layer() -> Any:  # a convolution and its gradient by the kernel: what a step does most
        y = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=[3, 3, 64, 64], out_backprop=y, strides=[1, 1, 1, 1], padding="SAME"
        )

    layer()
    threads = tf.config.threading.get_inter_op_parallelism_threads() or math.ceil(cores())
    done, stop = [0] * threads, threading.Event()

    def compute(number: int) -> None:
        while not stop.is_set():
            layer()
            done[number] += 1

    def pace(work: Any) -> tuple[float, float]:
        """(layers a second, seconds) while `work` runs."""
        before, at = sum(done), time.perf_counter()
        work()
        passed = time.perf_counter() - at
        return (sum(done) - before) / passed, passed

    taken: list[float] = []
    longer: tuple[list[float], list[float]] = ([], [])
    workers = [threading.Thread(target=compute, args=(n,), daemon=True) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(_CONTENDED_ROUNDS):
            free, _ = pace(lambda: time.sleep(_CONTENDED_SECONDS))
            for k, message in enumerate((small, large)):
                shared(0.0)  # all ranks compute now
                busy, passed = pace(lambda m=message, n=counts[k]: [m() for _ in range(n)])
                longer[k].append(passed / counts[k] - alone[k])
            taken.append(1 - busy / free if free else 0.0)  # by the large ones
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    start_up = max(0.0, statistics.median(longer[0]))
    stretch = 1 + max(0.0, statistics.median(longer[1]) - start_up) / alone[1]
    return min(0.9, max(0.0, statistics.median(taken))), stretch, start_up


def check(bytes_: int) -> float:
    """Seconds of one message of `bytes_`, as all ranks together see it: to tell whether the link is still the same."""
    message = _message(bytes_, f"check_{bytes_}")
    return shared(min(_time(message, repeats=2), _time(message, repeats=2)))


def _message(bytes_: int, label: str, dtypes: Sequence[str] = ("float32",)) -> Callable[[], Any]:
    """Sends a message of `bytes_` for each dtype, all at once.

    A concrete function, for TensorFlow warns of a tf.function that is made again and again.
    """
    messages = {}
    for dtype in dtypes:
        elements = bytes_ // tf.dtypes.as_dtype(dtype).size // _MEMBERS
        messages[f"{label}_{dtype}"] = [tf.zeros([elements], dtype) for _ in range(_MEMBERS)]

    def send() -> Any:
        return [
            mpi_ops._grouped_allreduce(
                parts, name=f"HorovodAllreduce_{ops.PROBE}_{name}", op=hvd.Sum, ignore_name_scope=True
            )
            for name, parts in messages.items()
        ]

    return tf.function(send, autograph=False).get_concrete_function()


def _time(function: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Seconds of one call, median: the shortest would be what a link lets through at once, not what it sustains."""
    function()
    seconds = []
    for _ in range(repeats):
        at = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - at)
    return statistics.median(seconds)


def shared(mine: float) -> float:
    """The mean over the ranks: the same number on each."""
    name = f"HorovodAllreduce_{ops.PROBE}_shared"
    return float(hvd.allreduce(tf.constant(mine, tf.float64), name=name, op=hvd.Average))


def _copy_seconds_per_byte() -> float:
    source, target = np.ones(2**21, np.float32), np.empty(2**21, np.float32)
    taken = []
    for _ in range(3):
        at = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - at)
    return min(taken) / source.nbytes
