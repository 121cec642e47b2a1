"""Trains deferred and undeferred, in each of the ways named on the command line, and reports what came of both."""

import os
import sys

from common import KERAS_3, RANK, data, digest, hvd, keras, mlp, np, put, state, tf, tf_caramel
from deferring import Lines, plans

from tf_caramel.runtime import deferral, fitting, hook

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
WATCHED = []  # what the functions that run look like from outside: is anything pending after a call?
across = fitting.across


def note(step):
    allowed = across(step)
    WATCHED.append(allowed)
    return allowed


fitting.across = note


def wrapped(optimizer):
    return tf_caramel.DistributedOptimizer(optimizer)


def pending():
    return [step.pending.of is not None for step in hook.steps()][-1:]


class Lamb(keras.optimizers.Adam):
    """A layer-wise rate, as LAMB has it: the norm of the variable is read in its update."""

    def update_step(self, gradient, variable, learning_rate=None):
        old = tf.identity(tf.convert_to_tensor(variable))
        if KERAS_3:
            super().update_step(gradient, variable, learning_rate)
        else:
            super().update_step(gradient, variable)
        change = tf.convert_to_tensor(variable) - old
        ratio = (tf.norm(old) + 1e-3) / (tf.norm(change) + 1e-3)
        variable.assign(old + 0.1 * ratio * change)


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "nesterov": lambda: keras.optimizers.SGD(schedule(), momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(schedule(), clipnorm=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.005, centered=True, momentum=0.5),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.05, clipvalue=0.1),
    "Lamb": lambda: Lamb(0.01),
    "EMA": lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.9),
    "EMA overwriting": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
}


def train(optimizer, callbacks=(), steps=1, epochs=2, model=None, source=None, **options):
    """Trains a new model. Returns it; what it was traced with and how its calls ran is in WATCHED."""
    model = model or mlp()
    model.compile(wrapped(optimizer), LOSS, jit_compile=False, steps_per_execution=steps)
    x, y = data(80)
    given = {"x": x, "y": y, "batch_size": 8, "shuffle": False} if source is None else {"x": source(x, y)}
    WATCHED.clear()
    history = model.fit(**given, epochs=epochs, verbose=0, callbacks=list(callbacks), **options)
    return model, [float(v) for v in history.history["loss"]]


def both(make, **options):
    """[deferred, undeferred]: {"state", "losses", "across": the calls after which something was left pending}."""
    results = []
    for plans.deferred in (True, False):
        made = {name: option() if callable(option) else option for name, option in options.items()}
        model, losses = train(make(), **made)
        results.append(
            {
                "state": state(model, model.optimizer),
                "losses": losses,
                "across": sum(WATCHED),
                "calls": len(WATCHED),
                "left": pending(),
                "arm": hook.steps()[-1].arm,
                "why": hook.steps()[-1].remarks,
            }
        )
    plans.deferred = True
    return results


def matrix():
    """Every optimizer, one and several steps in a call, with the loss of every call (across: the callback may)."""
    for name, make in OPTIMIZERS.items():
        for steps in (1, 4):
            losses = []
            seen = lambda losses=losses: [keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: losses.append(logs["loss"]))]  # noqa: E501
            put(f"{name} {steps}", [*both(make, steps=steps, callbacks=seen), losses])
    put("report", str(tf_caramel.report()))


for current in sys.argv[1:]:
    globals()[current]()
put("log", Lines.lines)
