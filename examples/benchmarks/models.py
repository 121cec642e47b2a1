"""The models of the benchmarks, by name: how to build each, what to feed it, what to minimise. Keras 2 and Keras 3.

All models return logits. `data` gives one batch; images and tokens are random, because what they show makes no
difference to the time of a step; the digits of `mlp` are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

layers = keras.layers
SHAPE = (64, 64, 3)
CLASSES = 10
TOKENS, LENGTH, WIDTH, HEADS, HIDDEN, BLOCKS = 8000, 64, 256, 4, 1024, 4

Arrays = tuple[np.ndarray, np.ndarray]


def resnet50() -> Any:
    return keras.applications.ResNet50(weights=None, input_shape=SHAPE, classes=CLASSES, classifier_activation=None)


def mobilenet() -> Any:
    return keras.applications.MobileNetV2(weights=None, input_shape=SHAPE, classes=CLASSES, classifier_activation=None)


def densenet() -> Any:
    return keras.applications.DenseNet121(weights=None, input_shape=SHAPE, classes=CLASSES, classifier_activation=None)


def vgg() -> Any:
    blocks = [[layers.Conv2D(f, 3, padding="same", activation="relu"), layers.MaxPooling2D()] for f in (32, 64, 128)]
    convolutions = [layer for block in blocks for layer in block] + [layers.Conv2D(256, 3, padding="same")]
    return keras.Sequential(
        [keras.Input(SHAPE), *convolutions, layers.Flatten(), layers.Dense(1536, "relu"), layers.Dense(CLASSES)]
    )


def mlp() -> Any:
    hidden = [layers.Dense(2048, "relu") for _ in range(4)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(CLASSES)])


class Positions(layers.Layer):
    """Adds one learned vector to each position: (batch, length, width) in and out."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(name="table", shape=tuple(shape[1:]), initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x + self.table


def bert() -> Any:
    """Like BERT: embedded tokens and positions, blocks of attention and a feed-forward net, the first token classified.

    The token table is Keras's own Embedding, as in users' models, whose gradient is a `tf.IndexedSlices`: to have it
    all-reduced and not all-gathered, pass `sparse_as_dense=True`, to `hvd.DistributedGradientTape` and to
    `tf_caramel.DistributedOptimizer` alike. With Keras 3 Horovod's tape wants TensorFlow's variables, `weight.value`.
    """
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH, name="tokens")(tokens)
    x = layers.LayerNormalization()(Positions(name="positions")(x))
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        fed = layers.Dense(WIDTH)(layers.Dense(HIDDEN, "gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, fed]))
    x = layers.Dense(WIDTH, "tanh", name="pooler")(layers.Flatten()(layers.Cropping1D((0, LENGTH - 1))(x)))
    return keras.Model(tokens, layers.Dense(CLASSES, name="classes")(x))


def images(batch: int, rng: np.random.RandomState) -> Arrays:
    return rng.rand(batch, *SHAPE).astype("float32"), rng.randint(0, CLASSES, batch)


def sentences(batch: int, rng: np.random.RandomState) -> Arrays:
    return rng.randint(0, TOKENS, (batch, LENGTH)).astype("int32"), rng.randint(0, CLASSES, batch)


def digits(batch: int, rng: np.random.RandomState) -> Arrays:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    some = rng.choice(len(x), batch)
    return x[some].astype("float32") / 16, y[some]


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclass(frozen=True)
class Entry:
    """A model of the benchmarks: factory, batch size by default, what is special about it, its data and its loss.

    sample(batch, rng) gives x, (batch, ...), and integer labels y, (batch,).
    """

    build: Callable[[], Any]
    batch: int
    description: str
    sample: Callable[[int, np.random.RandomState], Arrays] = images
    loss: Callable[[], Any] = cross_entropy


MODELS: dict[str, Entry] = {
    "resnet50": Entry(resnet50, 16, "23.6 M parameters in 214 tensors, 94 MB; random images of 64x64"),
    "vgg": Entry(vgg, 16, "25.6 M parameters in 12 tensors, one Dense has 100 MB; random images of 64x64"),
    "mobilenet": Entry(mobilenet, 32, "2.2 M parameters in 158 tensors, most of them small; random images of 64x64"),
    "densenet": Entry(densenet, 16, "7.0 M parameters in 364 tensors, 58 concatenations; random images of 64x64"),
    "bert": Entry(
        bert,
        16,
        "5.3 M parameters in 72 tensors, attention, a sparse gradient; random tokens, 64 a sentence",
        sentences,
    ),
    "mlp": Entry(mlp, 128, "12.7 M parameters in 10 tensors, 51 MB; scikit-learn's digits (real, 8x8)", digits),
}


def data(name: str, batch: int, seed: int) -> Arrays:
    """One batch for the model `name`: x, (batch, ...), and labels y, (batch,); the same for the same seed."""
    return MODELS[name].sample(batch, np.random.RandomState(seed))
