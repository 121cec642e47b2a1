"""A Keras model trained with `fit` on scikit-learn's digits, on as many ranks as horovodrun starts.

    TF_CARAMEL=1 horovodrun -np 2 python examples/keras_fit.py

`--measure FOLDER` adds the measurements that `examples/demo.py` shows; nothing else changes.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import numpy as np
from sklearn.datasets import load_digits

import tf_caramel
from tf_caramel.callbacks import BroadcastGlobalVariablesCallback, LearningRateWarmupCallback, MetricAverageCallback


def digits(rank: int, size: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of the images, (n, 8, 8, 1) in 0..1, and labels; every rank gets the same number of batches."""
    images, labels = load_digits(return_X_y=True)
    count = len(images) // (size * batch) * batch
    mine = slice(rank, rank + count * size, size)
    return images[mine].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[mine]


def build(width: int = 512, depth: int = 3) -> keras.Model:
    layers = [keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten()]
    for _ in range(depth):
        layers += [keras.layers.Dense(width, activation="relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="samples a rank and step")
    parser.add_argument("--measure", metavar="FOLDER", help="write what was measured there")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(1)
    model = build()
    rate = 0.001 * hvd.size()
    optimizer = tf_caramel.DistributedOptimizer(keras.optimizers.Adam(rate))  # the one line
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [
        BroadcastGlobalVariablesCallback(0),
        MetricAverageCallback(),
        LearningRateWarmupCallback(rate, warmup_epochs=2),
    ]
    x, y = digits(hvd.rank(), hvd.size(), options.batch)
    if options.measure:
        from measure import Measure

        callbacks.append(Measure(options.measure, x, y, options.batch))
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(x, y, batch_size=options.batch, epochs=options.epochs, callbacks=callbacks, verbose=verbose)


if __name__ == "__main__":
    main()
