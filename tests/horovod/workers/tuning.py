"""Trains long enough for the step to be traced, planned and judged, in the way named; reports what came of it.

STEPS: how many.  Reported: the exact state, each step's arm, why things were not done, what the log said.
"""

import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from common import KERAS_3, RANK, data, keras, mlp, put, state, tf, tf_caramel

from tf_caramel.runtime import hook, tuner


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


said = Lines()
logging.getLogger("tf_caramel").addHandler(said)
logging.getLogger("tf_caramel").setLevel(logging.INFO)
STEPS = int(os.environ.get("STEPS", "60"))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model=None, **options):
    model = model or mlp(width=64)
    optimizer = tf_caramel.DistributedOptimizer(keras.optimizers.Adam(0.01))
    compiled = {k: options.pop(k) for k in list(options) if k == "steps_per_execution"}
    model.compile(optimizer, LOSS, jit_compile=False, **compiled)
    x, y = data(samples=8 * STEPS)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options)
    put("state", state(model, optimizer))


def plain():
    fit()


def several_steps_a_call():
    fit(steps_per_execution=2)


def loop():
    """A loop of the user's own over two shapes of batches: two traced functions of one step."""
    model, optimizer = mlp(width=64), tf_caramel.DistributedOptimizer(keras.optimizers.Adam(0.01))
    if KERAS_3:
        optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    x, y = data(samples=8 * STEPS)
    for i in range(STEPS):
        size = 6 if (i + RANK) % 5 == 0 else 8  # not on the same steps on both ranks
        step(tf.constant(x[8 * i : 8 * i + size]), tf.constant(y[8 * i : 8 * i + size]))
    put("state", state(model, optimizer))


def other_graph_on_one_rank():
    class Same(keras.layers.Layer):
        def call(self, x):
            return tf.cond(tf.reduce_sum(x) > 1e9, lambda: x + 1.0, lambda: tf.identity(x)) if RANK == 0 else x

    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    fit(keras.Model(inputs, keras.layers.Dense(4)(Same()(keras.layers.Dense(8)(inputs)))))


def seeded_random_op():
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.uniform(tf.shape(x), maxval=0.1)

    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    fit(keras.Model(inputs, keras.layers.Dense(4)(Noise()(keras.layers.Dense(8)(inputs)))))


def deterministic():
    tf.config.experimental.enable_op_determinism()
    fit()


def own_profiler():
    class Profile(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                tf.profiler.experimental.start(os.environ["FOLDER"] + f"/rank{RANK}")

        def on_train_batch_end(self, batch, logs=None):
            if batch == 8:
                tf.profiler.experimental.stop()

    fit(callbacks=[Profile()])


def drift():
    """As soon as a plan is chosen, each step takes much longer."""
    tuner.CHECK_SECONDS = 0.01
    delay = [0.0]

    class Slow(keras.layers.Layer):
        def call(self, x):
            def wait(x):
                time.sleep(delay[0])
                return x

            y = tf.numpy_function(wait, [x], tf.float32)
            return x + 0.0 * tf.reshape(tf.stop_gradient(y), tf.shape(x))

    class Slower(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if any(step.tuner.reference for step in hook.steps()):  # of the step as it was judged
                delay[0] = 0.05

    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    fit(keras.Model(inputs, keras.layers.Dense(4)(Slow()(keras.layers.Dense(8)(inputs)))), callbacks=[Slower()])


globals()[sys.argv[1]]()
steps = hook.steps()
if steps:
    report = tf_caramel.report()
    put("report", str(report))
    report.html(Path(os.environ.get("FOLDER", tempfile.gettempdir()), f"report{RANK}.html"))
put("arms", [step.arm for step in steps])
put("measured", [sorted(step.tuner.record.arms) for step in steps])
put("why", [list(step.tuner.record.why) for step in steps])
put("plans", [step.plans[step.arm].to_json() if step.arm in step.plans else None for step in steps])
put("log", said.lines)
