"""The models of the benchmarks, by name, with random data: real data makes no difference to the time of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

layers = keras.layers
SHAPE = (64, 64, 3)
CLASSES = 10


def resnet50() -> Any:
    """23.6 M parameters in 214 tensors, 94 MB."""
    return keras.applications.ResNet50(weights=None, input_shape=SHAPE, classes=CLASSES)


def mobilenet() -> Any:
    """2.2 M parameters in 158 tensors, many of them small, 9 MB."""
    return keras.applications.MobileNetV2(weights=None, input_shape=SHAPE, classes=CLASSES)


def vgg() -> Any:
    """Four convolutions and one dense layer of 100 MB."""
    blocks = [[layers.Conv2D(f, 3, padding="same", activation="relu"), layers.MaxPooling2D()] for f in (32, 64, 128)]
    convolutions = [layer for block in blocks for layer in block] + [layers.Conv2D(256, 3, padding="same")]
    return keras.Sequential(
        [keras.Input(SHAPE), *convolutions, layers.Flatten(), layers.Dense(1536, "relu"), layers.Dense(CLASSES)]
    )


def mlp() -> Any:
    """Wide."""
    return keras.Sequential(
        [keras.Input(SHAPE), layers.Flatten(), *(layers.Dense(256, "relu") for _ in range(4)), layers.Dense(CLASSES)]
    )


MODELS: dict[str, Callable[[], Any]] = {"resnet50": resnet50, "mobilenet": mobilenet, "vgg": vgg, "mlp": mlp}


def data(name: str, batch: int, seed: int) -> tuple[Any, Any]:
    """One batch for a model."""
    rng = np.random.RandomState(seed)
    return rng.rand(batch, *SHAPE).astype("f4"), rng.randint(0, CLASSES, batch)
