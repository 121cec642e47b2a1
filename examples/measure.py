"""A callback that measures a run for the demo: step time, messages a step, compute and communication alone."""

import hashlib
import json
import os
import statistics
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from tf_caramel.callbacks import Callback, LearningRateWarmupCallback

SKIPPED_EPOCHS = 2


class Measure(Callback):
    """Writes FOLDER/rank<r>.json when training ends. Times in seconds; the last epoch only counts messages."""

    def __init__(self, folder: str, x: np.ndarray, y: np.ndarray, batch: int) -> None:
        self.folder, self.x, self.y, self.batch = Path(folder), x, y, batch
        self.steps = len(x) // batch
        self.step_seconds: list[float] = []
        self.timeline = self.folder / "timeline.json"
        self.digest = ""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if epoch == self.params["epochs"] - 1:
            self.digest = digest(self.model.trainable_weights)
            self.folder.mkdir(parents=True, exist_ok=True)
            hvd.start_timeline(str(self.timeline))
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if SKIPPED_EPOCHS <= epoch < self.params["epochs"] - 1:
            self.step_seconds.append((time.perf_counter() - self.began) / self.steps)

    def on_train_end(self, logs: object = None) -> None:
        hvd.stop_timeline()
        # Adam's state and the parameters after the whole run; batch statistics are each rank's own.
        weights = digest([*self.model.trainable_weights, *self.model.optimizer.variables])
        result = {
            "weights": [self.digest, weights],
            "step_seconds": statistics.median(self.step_seconds),
            "messages_per_step": messages(self.timeline) / self.steps if hvd.rank() == 0 else None,
            "gradient_bytes": sum(4 * int(np.prod(v.shape)) for v in self.model.trainable_weights),
        }
        if os.environ.get("TF_CARAMEL", "0") == "0":  # once is enough, in the plain run
            result["communication_seconds"] = communication_seconds(self.model.trainable_weights)
            result["compute_seconds"] = self.compute_seconds()
        (self.folder / f"rank{hvd.rank()}.json").write_text(json.dumps(result))

    def compute_seconds(self) -> float:
        """A step of the same model with the plain optimizer: nothing is exchanged, all ranks compute at once.

        With a callback for every batch, as in training: it makes `fit` wait for each step.
        """
        model = keras.models.clone_model(self.model)
        model.compile(keras.optimizers.Adam(0.001), self.model.loss, metrics=["accuracy"], jit_compile=False)
        every_batch = LearningRateWarmupCallback(0.001, warmup_epochs=1e-9)
        times = []
        for _ in range(4):
            hvd.allreduce(tf.constant(0.0), name="measure.start")
            began = time.perf_counter()
            model.fit(self.x, self.y, batch_size=self.batch, verbose=0, callbacks=[every_batch])
            times.append((time.perf_counter() - began) / self.steps)
        return statistics.median(times[1:])


def communication_seconds(variables: list) -> float:
    """The all-reduce of all gradients as one message, nothing else going on."""
    values = [tf.convert_to_tensor(v) for v in variables]

    @tf.function
    def reduce(*tensors: tf.Tensor) -> list:
        return hvd.grouped_allreduce(list(tensors), name="measure.communication")

    times = []
    for _ in range(12):
        hvd.allreduce(tf.constant(0.0), name="measure.start")
        began = time.perf_counter()
        reduce(*values)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def messages(timeline: Path) -> int:
    """All-reduces that Horovod performed: how often its one communication thread went from idle to busy."""
    open_events = count = 0
    stacks: dict[int, list[str]] = {}
    for event in json.loads(timeline.read_text().rstrip().rstrip(",").rstrip("]") + "]"):
        stack = stacks.setdefault(event.get("pid", -1), [])
        if event.get("ph") == "B":
            stack.append(event["name"])
            if event["name"] == "GLOO_ALLREDUCE":
                count += open_events == 0
                open_events += 1
        elif event.get("ph") == "E" and stack and stack.pop() == "GLOO_ALLREDUCE":
            open_events -= 1
    return count


def digest(variables: list) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(v.numpy()).tobytes() for v in variables)).hexdigest()[:16]
