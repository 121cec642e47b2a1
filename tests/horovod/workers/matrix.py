"""Trains every optimizer in every way of driving it; reports the exact final state. HVD=1: Horovod's wrapper."""

import os

from common import KERAS_3, data, hvd, keras, mlp, put, state, tf, tf_caramel

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.005),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class OwnStep(keras.Model):
    """A custom train_step that calls apply_gradients, which Horovod's wrapper never reduces."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = LOSS(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def wrap(optimizer):
    if os.environ.get("HVD"):
        import horovod.tensorflow.keras as hvd_keras

        return hvd_keras.DistributedOptimizer(optimizer)
    return tf_caramel.DistributedOptimizer(optimizer)


def fit(optimizer, base=None, **options):
    model = mlp(base=base)
    model.compile(optimizer, LOSS, jit_compile=False, **options)
    x, y = data()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


def loop(optimizer):
    model = mlp()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        if os.environ.get("HVD"):
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    if KERAS_3:
        optimizer.build(model.trainable_variables)
    x, y = data()
    for i in range(0, len(x), 8):
        step(tf.constant(x[i : i + 8]), tf.constant(y[i : i + 8]))
    return model


for name, make in OPTIMIZERS.items():
    for way in ("plain", "steps_per_execution", "train_step", "tape"):
        if os.environ.get("HVD") and way == "train_step":
            continue
        bare = os.environ.get("HVD") and way == "tape"
        optimizer = make() if bare else wrap(make())
        if way == "tape":
            model = loop(optimizer)
        else:
            options = {"steps_per_execution": 4} if way == "steps_per_execution" else {}
            model = fit(optimizer, OwnStep if way == "train_step" else None, **options)
        put(f"{name} {way}", state(model, model.optimizer if way != "tape" else optimizer))
