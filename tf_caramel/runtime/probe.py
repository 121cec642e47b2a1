"""Measures the network with a handful of real all-reduces of different sizes: a + b*bytes, and their CPU time.

A collective: all ranks call it at the same point, and all send the same messages. What is measured is what a batch of a
step pays: from the readiness of its gradients inside a tf.function to the readiness of the results.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from graph_passes import ops
from tf_caramel.planner.network import fit
from tf_caramel.planner.profile import Network

SIZES = (16 * 2**10, 128 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)  # bytes
BUDGET_SECONDS = 3.0
_MEMBERS = 4  # tensors in a message, so that packing is part of what is measured
_REPEATS = 5
_QUEUED_BYTES = 512 * 2**10


def cores() -> float:
    """Cores that this rank computes on."""
    return len(os.sched_getaffinity(0)) / max(1, hvd.local_size())


def network() -> Network:
    """The network between the ranks, as this rank saw it; `merge` makes one of several."""
    samples: list[tuple[int, float]] = []
    cpu: list[tuple[int, float]] = []
    began = time.perf_counter()
    for size in SIZES:
        seconds, cpu_seconds = _time(_message(size, "float32", f"{size}"))
        samples.append((size, seconds))
        cpu.append((size, max(cpu_seconds, 1e-7)))
        spent = shared(time.perf_counter() - began)
        if spent + shared(seconds) * (_REPEATS + 1) * 4 > BUDGET_SECONDS and len(samples) > 2:
            break
    a, b = fit(samples)
    cpu_a, cpu_b = fit(cpu)
    # Two messages that are ready together; of different dtypes, or Horovod would merge them.
    one, two = (_message(_QUEUED_BYTES, dtype, f"queued_{dtype}") for dtype in ("float32", "float64"))
    alone, _ = _time(one)
    both, _ = _time(lambda: (*one(), *two()))
    return Network(
        start_up_seconds=a,
        seconds_per_byte=b,
        queued_seconds=min(a, max(0.0, both - alone - b * _QUEUED_BYTES)),
        cpu_seconds_per_message=cpu_a,
        cpu_seconds_per_byte=cpu_b,
        copy_seconds_per_byte=_copy_seconds_per_byte(),
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
        seen[0].ranks,
        samples,
    )


def check(bytes_: int) -> float:
    """Seconds of one message of `bytes_`, as all ranks together see it: to tell whether the link is still the same."""
    message = _message(bytes_, "float32", f"check_{bytes_}")
    return shared(min(_time(message, repeats=2)[0], _time(message, repeats=2)[0]))


def _message(bytes_: int, dtype: str, label: str) -> Any:
    elements = bytes_ // tf.dtypes.as_dtype(dtype).size // _MEMBERS
    parts = [tf.zeros([elements], dtype) for _ in range(_MEMBERS)]
    name = f"HorovodAllreduce_{ops.PROBE}_{label}"
    return lambda: mpi_ops._grouped_allreduce(parts, name=name, op=hvd.Sum, ignore_name_scope=True)


def _time(messages: Any, repeats: int = _REPEATS) -> tuple[float, float]:
    """(wall seconds, this process's CPU seconds) of one call, medians."""
    function = tf.function(messages, autograph=False)
    function()
    wall, cpu = [], []
    for _ in range(repeats):
        at, used = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - at)
        cpu.append(time.process_time() - used)
    return statistics.median(wall), statistics.median(cpu)


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
