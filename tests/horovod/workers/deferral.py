"""Trains deferred and undeferred, in each of the ways named on the command line, and reports what came of both."""

import os
import sys

from common import KERAS_3, RANK, data, digest, keras, mlp, put, state, tf, tf_caramel
from deferring import Lines, plans

from tf_caramel.runtime import deferral, fitting, hook

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ANSWERS = []  # of each call that could leave something pending: does it?
_across = fitting.across


def noted(step):
    ANSWERS.append(_across(step))
    return ANSWERS[-1]


fitting.across = noted


def wrapped(optimizer):
    return tf_caramel.DistributedOptimizer(optimizer)


def waiting():
    """Is anything pending?"""
    return any(pending.of is not None for pending in deferral._all)


class Lamb(keras.optimizers.Adam):
    """A rate for each variable, as LAMB has it: the norm of the variable is part of its update."""

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
SEVERAL = ("nesterov", "AdamW")


def compiled(optimizer, steps=1, model=None):
    model = model or mlp()
    model.compile(wrapped(optimizer), LOSS, jit_compile=False, steps_per_execution=steps)
    return model


def fit(model, epochs=2, **options):
    """The losses of the epochs."""
    x, y = data(80)
    given = {"x": x, "y": y, "batch_size": 8} if "x" not in options else {}
    history = model.fit(**given, shuffle=False, epochs=epochs, verbose=0, **options)
    return [float(v) for v in history.history["loss"]]


def both(case, *arguments):
    """What case(*arguments) returns deferred and undeferred, and how often something was left pending."""
    results = []
    for plans.deferred in (True, False):
        ANSWERS.clear()
        outcome = case(*arguments)
        results.append({"outcome": outcome, "across": sum(ANSWERS), "calls": len(ANSWERS), "waiting": waiting()})
    plans.deferred = True
    return {"deferred": results[0], "undeferred": results[1]}


def matrix():
    """Every optimizer, with the loss of every call (the callback may see it), and once with several steps in a call."""

    def case(make, steps):
        losses = []
        seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"])))
        model = compiled(make(), steps)
        epochs = fit(model, callbacks=[seen])
        return {"state": state(model, model.optimizer), "losses": losses, "epochs": epochs}

    for name, make in OPTIMIZERS.items():
        put(name, both(case, make, 1))
        if name in SEVERAL:
            ANSWERS.clear()
            put(f"{name}, several steps", case(make, 4) | {"across": sum(ANSWERS)})
    put("report", str(tf_caramel.report()))


class Looks(keras.callbacks.Callback):
    """Notes the weights in every hook; on each batch only if asked to."""

    def __init__(self, everywhere):
        super().__init__()
        self.seen = []
        hooks = [f"on_{what}_{when}" for what in ("train", "epoch", "test") for when in ("begin", "end")]
        for hook_ in [*hooks, *(["on_train_batch_begin", "on_train_batch_end"] if everywhere else [])]:
            setattr(self, hook_, lambda *_, hook_=hook_, **__: self.seen.append([hook_, self.look()]))

    def look(self):
        return digest([*self.model.trainable_weights, *self.model.optimizer.variables])


def looks():
    """Weights and slots as seen by callbacks, validation, prediction and saving inside fit; then fit goes on."""

    def case(everywhere, steps):
        folder = os.environ["FOLDER"]
        watch = Looks(everywhere)
        model = compiled(keras.optimizers.Adam(0.01), steps)
        other = keras.Model(model.inputs, model.layers[1].output)  # shares a layer
        x, y = data(16)

        class Uses(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch:
                    return
                watch.seen.append(["predict", digest([model.predict(x, verbose=0)])])
                watch.seen.append(["other model", digest([other.predict(x, verbose=0)])])
                watch.seen.append(["evaluate", float(model.evaluate(x, y, verbose=0))])
                watch.seen.append(["get_weights", digest(model.get_weights())])
                if RANK == 0:
                    model.save_weights(f"{folder}/look.weights.h5")
                    model.save(f"{folder}/look.keras")
                    loaded = keras.models.load_model(f"{folder}/look.keras")
                    watch.seen.append(["saved", digest(loaded.get_weights())])

        slower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0)
        saves = keras.callbacks.ModelCheckpoint(f"{folder}/check.weights.h5", save_weights_only=True)
        users = [watch, slower, *([] if everywhere else [Uses()]), *([saves] if RANK == 0 else [])]
        losses = fit(model, callbacks=users, validation_data=(x, y))
        model.optimizer.learning_rate = 0.003
        losses += fit(model, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)])
        return {"seen": watch.seen, "losses": losses, "state": state(model, model.optimizer)}

    put("at epochs", both(case, False, 1))
    put("at batches", both(case, True, 4))


def callbacks():
    """Callbacks that act on batches and are known: broadcasting, warming up, saving at epochs."""

    def case():
        keras.utils.set_random_seed(RANK)
        inputs = keras.Input((12,))
        model = keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(8, activation="relu")(inputs)))
        model = compiled(keras.optimizers.SGD(0.4, momentum=0.9), model=model)
        broadcast = tf_caramel.callbacks.BroadcastGlobalVariablesCallback(0)
        warm_up = tf_caramel.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
        losses = fit(model, callbacks=[broadcast, warm_up, keras.callbacks.TerminateOnNaN()], epochs=3)
        return {"state": state(model, model.optimizer), "losses": losses}

    put("callbacks", both(case))


def refused():
    """What might look between batches: reasons, on one rank or on all; nothing is left pending."""

    def generator():
        x, y = data(80)
        while True:
            for k in range(0, 80, 8):
                yield x[k : k + 8], y[k : k + 8]

    def dataset(python):
        made = tf.data.Dataset.from_tensor_slices(data(80))
        if python:
            made = made.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(lambda v: v, [x], tf.float32), [12]), y))
        return made.batch(8)

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert not waiting()

    class Overrides(keras.Model):
        def evaluate(self, *args, **kwargs):
            return super().evaluate(*args, **kwargs)

    cases = {
        "dataset": {"x": dataset(False)},
        "python in the dataset": {"x": dataset(True)},
        "generator": {"x": generator(), "steps_per_epoch": 10},
        "own callback on rank 1": {"callbacks": [Own()] if RANK == 1 else []},
        "overrides": {},
    }
    for name, options in cases.items():
        model = compiled(keras.optimizers.SGD(0.1), model=mlp(base=Overrides) if name == "overrides" else None)
        ANSWERS.clear()
        fit(model, epochs=1, **options)
        put(name, {"across": sum(ANSWERS), "calls": len(ANSWERS), "why": hook.steps()[-1].remarks})
    model = compiled(keras.optimizers.SGD(0.1))
    x, y = data()
    ANSWERS.clear()
    for k in range(0, 32, 8):
        model.train_on_batch(x[k : k + 8], y[k : k + 8])
        assert not waiting()
    put("train_on_batch", {"across": sum(ANSWERS), "calls": len(ANSWERS), "why": hook.steps()[-1].remarks})
    put("report", str(tf_caramel.report()))


def resumes():
    """Two epochs, a checkpoint, a new model that goes on from it: the same as three at once."""

    def case(broken):
        model = compiled(keras.optimizers.Adam(0.01))
        path = os.environ["FOLDER"] + f"/resume-{RANK}.keras"
        save = keras.callbacks.ModelCheckpoint(path)
        fit(model, epochs=1 if broken else 3, callbacks=[save])
        if broken:
            loaded = keras.models.load_model(path)
            loaded.compile(wrapped(loaded.optimizer), LOSS, jit_compile=False)
            model = loaded
            fit(model, epochs=2)
        return state(model, model.optimizer)

    put("resumed", both(case, True))
    put("at once", case(False))


def data_end():
    """Data that end in the middle of a call of several steps, whose number Keras does not know."""

    def case(samples, steps):
        model = compiled(keras.optimizers.Adam(0.01), steps)
        x, y = data(80)
        slices = tf.data.Dataset.from_tensor_slices((x[:samples], y[:samples])).batch(8)
        more = {} if KERAS_3 else {"steps_per_epoch": 8}  # Keras 2 has to be told a number
        try:
            losses = fit(model, x=slices.filter(lambda *_: True), epochs=2, **more)
        except ValueError as error:  # Keras 2, if no call was completed
            losses = str(error).partition(".")[0]
        return {"state": state(model, model.optimizer), "losses": losses}

    for samples, steps in ((48, 4), (24, 4), (40, 1)):
        put(f"{samples} {steps}", both(case, samples, steps))


def bad_batch():
    """A label that does not exist makes a call fail, on all ranks, after the last one's updates were applied."""

    def case():
        model = compiled(keras.optimizers.SGD(0.1))
        x, y = data(80)
        y[40] = 77
        try:
            fit(model, x=x, y=y, batch_size=8, epochs=1)
        except tf.errors.InvalidArgumentError:
            failed = True
        return {"state": digest(model.trainable_weights[2:]), "failed": failed}

    put("bad batch", both(case))


def nested():
    """A callback trains another model when an epoch ends; then it fails, and fit is called again."""

    def case():
        inner, outer = compiled(keras.optimizers.SGD(0.1)), compiled(keras.optimizers.Adam(0.01))
        seen = []

        class Trains(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                fit(inner, epochs=1)
                seen.append([waiting(), digest(inner.trainable_weights), digest(outer.trainable_weights)])
                if epoch:
                    raise KeyError("enough")

        try:
            fit(outer, callbacks=[Trains()])
        except KeyError:
            seen.append(waiting())
        fit(outer, epochs=1)
        return [seen, state(outer, outer.optimizer), state(inner, inner.optimizer)]

    put("nested", both(case))


def loop():
    """A loop of the user's own, who flushes before looking (TF_CARAMEL_DEFER=across)."""

    def case():
        model, optimizer = mlp(), wrapped(keras.optimizers.Adam(0.01))
        if KERAS_3:
            optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x, training=True))
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
            return loss

        x, y = data(80)
        seen = []
        for k in range(0, 80, 8):
            size = 5 if k == 40 + 8 * RANK else 8  # traced anew, not at the same step on both ranks
            loss = float(step(tf.constant(x[k : k + size]), tf.constant(y[k : k + size])))
            seen.append([loss, waiting() == plans.deferred, tf_caramel.flush() == plans.deferred if k % 24 == 0 else 0])
            if k % 24 == 0:
                seen.append([tf_caramel.flush(), state(model, optimizer)])
        tf_caramel.flush()
        return [seen, state(model, optimizer)]

    put("loop", both(case))


def repeats():
    """The same training twice, on three ranks."""

    def case():
        model = compiled(keras.optimizers.Adam(0.01))
        return [fit(model), state(model, model.optimizer)]

    put("first", case())
    put("again", case())
    put("across", sum(ANSWERS))


for current in sys.argv[1:]:
    globals()[current]()
put("log", Lines.lines)
