"""Which threads have a real-time priority: after each step of training until plans are judged; when Horovod is
initialised anew.

NOBODY: trains as a user who may not give one.
"""

import os
import resource
import sys
import time

from common import data, hvd, keras, mlp, put, tf_caramel

from tf_caramel.runtime import hook
from tf_caramel.runtime.priority import Priority


def threads():
    return {int(name) for name in os.listdir("/proc/self/task")}


def first():
    return sorted(t for t in threads() if os.sched_getscheduler(t) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO)


def start_anew():
    hvd.shutdown()
    before = threads()
    hvd.init()
    time.sleep(0.3)
    return sorted(threads() - before)


class Look(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(first())


def anew():
    priority = Priority(wanted=True)
    for name in ("", "anew "):
        put(f"{name}horovods", start_anew())
        priority.let(True)
        put(f"{name}first", first())
    priority.let(False)
    put("like all others", first())


def train():
    put("horovods", start_anew())
    if os.environ.get("NOBODY"):
        resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
        os.seteuid(65534)
    model = mlp(width=64)
    optimizer = tf_caramel.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    x, y = data(samples=8 * 80)
    look = Look()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[look])
    (step,) = hook.steps()
    put("found", look.found)
    put("chosen", step.arm)
    put("why", step.remarks)


globals()[sys.argv[1]]()
