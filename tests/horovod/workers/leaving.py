"""Training that fails on one rank or on all, in the way named; deferred. Ranks end or go on, and none may hang."""

import os
import signal
import sys
import threading
import time

from common import RANK, SIZE, data, digest, keras, mlp, put, tf_caramel
from deferring import Lines

from tf_caramel.runtime import deferral

what = sys.argv[1]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STEP = 13  # of 20 in two epochs


class Fails(keras.callbacks.Callback):
    """Acts after STEP calls. TF_CARAMEL_DEFER=across lets it do so between two batches."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def on_train_batch_end(self, batch, logs=None):
        self.calls += 1
        if self.calls == STEP:
            put("pending", any(p.of is not None for p in deferral._all))
            fail()


def fail():
    if what in ("callback", "callback and exit") and RANK == 1:
        raise ValueError("boom")
    if what == "killed" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if what == "interrupt one" and RANK == 1:
        os.kill(os.getpid(), signal.SIGINT)


def trained(steps, callbacks=()):
    model = mlp()
    model.compile(tf_caramel.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), LOSS, jit_compile=False)
    x, y = data(80)
    began = time.monotonic()
    try:
        for first in range(0, steps, 10):
            count = 8 * min(10, steps - first)
            model.fit(x[:count], y[:count], batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))
    except BaseException as error:
        put("error", f"{type(error).__name__}: {error}")
        put("seconds", time.monotonic() - began)
        if what.endswith("and exit"):
            put("state", digest(model.trainable_weights))
            put("log", Lines.lines)
            raise
    return digest(model.trainable_weights)


put("expected", trained(STEP))
put("state", trained(20, [Fails()]))
put("log", Lines.lines)
put("waiting", any(p.of is not None for p in deferral._all))
if what == "callback" and RANK == 1:
    time.sleep(15)  # it lives on, without Horovod
_ = SIZE, threading
os._exit(0)
