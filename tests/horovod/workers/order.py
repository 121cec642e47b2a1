"""Four parallel three-layer branches, 16 steps, with Horovod's trace log on: who enqueues what, in which order."""

import os
import time

from common import data, keras, put, tf_caramel

keras.utils.set_random_seed(1)
inputs = keras.Input((64,))
branches = []
for branch in range(4):
    x = inputs
    for _ in range(3):
        x = keras.layers.Dense(96 + 8 * branch, activation="relu")(x)
    branches.append(x)
model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Concatenate()(branches)))
optimizer = keras.optimizers.Adam(0.01)
if os.environ.get("HVD"):
    import horovod.tensorflow.keras as hvd_keras

    optimizer = hvd_keras.DistributedOptimizer(optimizer)
else:
    optimizer = tf_caramel.DistributedOptimizer(optimizer)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)


class Mark(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)  # Horovod logs that it has taken a batch after it took it: sometimes when the step is over
        os.write(1, f"\nSTEP {batch}\n".encode())  # its threads write a line in pieces: the mark brings its own


x, y = data(samples=16 * 8, features=64)
model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Mark()])
put("done", True)
