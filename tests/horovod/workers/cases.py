"""Small multi-rank cases, one function each, named on the command line; each reports what its test compares.

HVD=1: Horovod's optimizer instead of ours, where a case allows it. FOLDER: where a case may write.
"""

import logging
import os
import sys

from common import KERAS_3, RANK, SIZE, data, digest, hvd, keras, mlp, np, report, state, tf, tf_caramel

logging.basicConfig(level=logging.INFO, format="%(message)s")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def put(name, value):
    report(f"{current}/{name}", value)


def wrapped(optimizer=None, **options):
    return tf_caramel.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1), **options)


def maybe_horovods():
    if not os.environ.get("HVD"):
        return wrapped()
    import horovod.tensorflow.keras as hvd_keras

    return hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))


def train(model, optimizer, x, y, **options):
    model.compile(optimizer, LOSS, jit_compile=options.pop("jit_compile", False))
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options)


def step_on(optimizer, values, gradients):
    """One step of a custom loop on variables with given values and gradients; returns the variables' new values."""
    variables = [keras.Variable(v) if KERAS_3 else tf.Variable(v) for v in values]
    if KERAS_3:
        optimizer.build(variables)

    @tf.function
    def step():
        optimizer.apply_gradients([(g() if callable(g) else g, v) for g, v in zip(gradients, variables)])

    step()
    return [v.numpy().tolist() for v in variables]


def branch_on_one_rank():
    """T2: rank 0's model has an extra tf.cond, which changes every counter in the names that TensorFlow makes."""

    class Same(keras.layers.Layer):
        def call(self, x):
            return tf.cond(tf.reduce_sum(x) > 1e9, lambda: x + 1.0, lambda: tf.identity(x)) if RANK == 0 else x

    keras.utils.set_random_seed(3)
    inputs = keras.Input((12,))
    x = Same()(keras.layers.Dense(8, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    train(model, maybe_horovods(), *data())
    put("weights", digest(model.trainable_weights))


def joined_batch():
    """T4: a custom train_step with apply_gradients on two ranks is one process on the joined batch."""

    class OwnStep(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = LOSS(y, self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return {"loss": loss}

    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((12,))
        hidden = keras.layers.Dense(16, activation="relu")(inputs)
        return OwnStep(inputs, keras.layers.Dense(4)(hidden))

    model = make()
    train(model, wrapped(), *data())
    put("weights", digest(model.trainable_weights))
    shares = [data(rank=rank) for rank in range(SIZE)]
    x, y = (np.stack([s[i].reshape(8, 8, *s[i].shape[1:]) for s in shares], 1) for i in (0, 1))
    alone = make()
    alone.compile(keras.optimizers.SGD(0.1), LOSS, jit_compile=False)
    alone.fit(x.reshape(-1, 12), y.reshape(-1), batch_size=8 * SIZE, shuffle=False, verbose=0)
    pairs = zip(model.get_weights(), alone.get_weights())
    put("distance", float(max(np.abs(a - b).max() for a, b in pairs)))


def dense_before_sparse():
    """T5: a dense layer made before an embedding, with and without groups, and with sparse_as_dense."""

    def run(**options):
        keras.utils.set_random_seed(5)
        head = keras.layers.Dense(4)
        inputs = keras.Input((6,), dtype="int32")
        embedded = keras.layers.Embedding(50, 5)(inputs)
        model = keras.Model(inputs, head(keras.layers.Flatten()(embedded)))
        x = np.random.RandomState(RANK).randint(0, 50, (64, 6))
        train(model, wrapped(**options), x, data()[1])
        return model.get_weights()

    plain = run()
    results = {"groups": run(groups=1), "dense": run(sparse_as_dense=True), "both": run(groups=2, sparse_as_dense=True)}
    put("plain", digest(plain))
    for name, weights in results.items():
        put(name, digest(weights))
        put(f"{name} distance", float(max(np.abs(a - b).max() for a, b in zip(plain, weights))))


def reduction_options():
    """T11 and its relatives: one weight, gradient rank + 1, learning rate 1: what is subtracted?"""
    mine = tf.constant([float(RANK + 1)])

    def result(**options):
        return step_on(wrapped(keras.optimizers.SGD(1.0), **options), [[0.0]], [mine])[0][0]

    put("average", result())
    put("sum", result(op=hvd.Sum))
    put("predivide", result(gradient_predivide_factor=2.0))
    put("fp16", result(compression=hvd.Compression.fp16))
    put("groups", result(groups=1))
    small = tf.constant([1e-8 * (RANK + 1)])
    put(
        "fp16 underflow",
        step_on(wrapped(keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16), [[0.0]], [small]),
    )
    slices = tf.IndexedSlices(tf.constant([[1.0 + RANK], [2.0]]), tf.constant([RANK, 2]), tf.constant([3, 1]))
    for name, options in {
        "sparse average": {},
        "sparse sum": {"op": hvd.Sum},
        "sparse as dense": {"sparse_as_dense": True},
        "sparse predivide": {"gradient_predivide_factor": 2.0},
    }.items():
        put(name, step_on(wrapped(keras.optimizers.SGD(1.0), **options), [[[0.0], [0.0], [0.0]]], [lambda: slices])[0])
    put("none", step_on(wrapped(keras.optimizers.SGD(1.0)), [[0.0], [0.0]], [mine, None])[1])


def keeps_state():
    """T10: an optimizer that already took two steps, excludes a variable from decay, and cannot be serialised."""

    class Odd(keras.optimizers.AdamW):
        def __init__(self, secret, **options):
            super().__init__(**options)
            self.secret = secret

    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 * tf.pow(0.5, tf.cast(step, tf.float32))

    model = mlp()
    optimizer = Odd(object(), learning_rate=Halving(), weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    x, y = data(16, rank=0)
    train(model, optimizer, x, y)
    before = state(model, optimizer)
    kind, secret = type(optimizer), optimizer.secret
    again = wrapped(optimizer)
    put("kept", again is optimizer and type(again) is kind and again.secret is secret)
    put("iterations", int(again.iterations.numpy()))
    put("same state", state(model, again) == before)
    put("still excluded", not again._use_weight_decay(model.layers[1].bias))
    train(model, again, *data())
    put("iterations after", int(again.iterations.numpy()))
    put("weights", digest(model.trainable_weights))


def save_and_resume():
    """T9: train, save in every format, load on both ranks and go on; the same as a run that was not broken."""
    folder = os.environ["FOLDER"]
    x, y = data()

    def fresh():
        model = mlp()
        model.compile(wrapped(keras.optimizers.Adam(0.01)), LOSS, jit_compile=False)
        return model

    def fit(model, part):
        model.fit(x[part], y[part], batch_size=8, shuffle=False, verbose=0)

    unbroken = fresh()
    fit(unbroken, slice(0, 32))
    for kind in ("keras", "h5"):
        unbroken.save(f"{folder}/model-{RANK}.{kind}")
    unbroken.save_weights(f"{folder}/{RANK}.weights.h5")
    put("saved", digest(unbroken.get_weights()))
    put("iterations", int(unbroken.optimizer.iterations.numpy()))
    fit(unbroken, slice(32, 64))
    put("unbroken", state(unbroken, unbroken.optimizer))
    for kind in ("keras", "h5"):
        loaded = keras.models.load_model(f"{folder}/model-{RANK}.{kind}")
        put(f"{kind} iterations", int(loaded.optimizer.iterations.numpy()))
        if kind == "h5" and KERAS_3:
            continue  # Keras 3 itself cannot train on with an optimizer from .h5: it forgets its variables
        loaded.compile(wrapped(loaded.optimizer), LOSS, jit_compile=False)
        fit(loaded, slice(32, 64))
        put(kind, state(loaded, loaded.optimizer))


def keras_callbacks():
    """T12: broadcast, metric average and warm-up together, with different seeds, momentum and rank-dependent data."""
    keras.utils.set_random_seed(RANK)
    inputs = keras.Input((12,))
    x = keras.layers.Dropout(0.2)(keras.layers.Dense(8, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(4)(x))
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    callbacks = [
        tf_caramel.callbacks.BroadcastGlobalVariablesCallback(0),
        tf_caramel.callbacks.MetricAverageCallback(),
        tf_caramel.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1),
        Watch(),
    ]
    optimizer = wrapped(keras.optimizers.SGD(0.4, momentum=0.9))
    model.compile(optimizer, LOSS, metrics=["accuracy"], jit_compile=False)
    history = model.fit(*data(), batch_size=16, epochs=3, verbose=0, callbacks=callbacks, validation_data=data(16))
    put("weights", state(model, optimizer))
    put("history", {k: [float(v) for v in values] for k, values in sorted(history.history.items())})
    put("rates", rates)


def train_sgd():
    model = mlp()
    optimizer = wrapped()
    train(model, optimizer, *data())
    put("weights", state(model, optimizer))


def failing_pass():
    """A pass that raises on one rank: every rank keeps the function as traced and trains."""
    from graph_passes import inline, regroup

    def broken(self, module, plan):
        raise RuntimeError("boom")

    if RANK == 1:
        (inline.Inline if os.environ["BROKEN"] == "inline" else regroup.Regroup).run = broken
    train_sgd()


def compiled():
    """T15: jit_compile=True."""
    train(mlp(), maybe_horovods(), *data(), jit_compile=True)


def many_tensors():
    """1,200 small tensors in one step."""
    keras.utils.set_random_seed(0)
    count = 1200
    rng = np.random.RandomState(0)
    start = rng.rand(count, 3).astype("f4")
    variables = [keras.Variable(v) if KERAS_3 else tf.Variable(v) for v in start]
    optimizer = wrapped(keras.optimizers.SGD(0.1))
    if KERAS_3:
        optimizer.build(variables)
    scale = tf.constant(float(RANK + 1))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.square(tf.convert_to_tensor(v))) for v in variables]) * scale
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    for _ in range(3):
        step()
    put("weights", digest(variables))
    mean = np.mean([rank + 1 for rank in range(SIZE)])
    expected = start * (1 - 0.1 * 2 * mean) ** 3
    put("distance", float(np.abs(np.stack([v.numpy() for v in variables]) - expected).max()))


def nothing_to_do():
    """One rank, or a function without collectives: nothing is rewritten, and on one rank nothing is exchanged."""
    from tf_caramel.runtime import tf_private

    double = tf.function(lambda x: x * 2.0)
    put("plain", tf_private.function_name(double.get_concrete_function(tf.constant(1.0))))
    variable = keras.Variable([1.0]) if KERAS_3 else tf.Variable([1.0])
    optimizer = wrapped()
    if KERAS_3:
        optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply_gradients([(tf.constant([1.0]), variable)]))
    concrete = step.get_concrete_function()
    running = concrete._inference_function
    runs = tf_private.name_of(getattr(running, "arm", running))
    put("step", runs)
    defs = tf_private.function_defs(runs).values()
    put("collectives", sum(n.op.startswith("Horovod") for d in defs for n in d.node_def))


def loss_scale():
    """Mixed precision: the loss scale must be outside, so that all ranks take the same branch."""
    make = keras.mixed_precision.LossScaleOptimizer
    model = mlp()
    optimizer = wrapped(make(keras.optimizers.SGD(0.1)))
    train(model, optimizer, *data())
    put("weights", digest(model.trainable_weights))
    try:
        train(mlp(), make(wrapped()), *data())
    except ValueError as error:
        put("refused", "wrap the LossScaleOptimizer itself" in str(error))


def nested_functions():
    """Collectives in nested tf.functions and in a loop over steps."""
    model = mlp()
    optimizer = wrapped(keras.optimizers.Adam(0.01))
    if KERAS_3:
        optimizer.build(model.trainable_variables)
    x, y = data()
    batches = tf.constant(x.reshape(8, 8, -1)), tf.constant(y.reshape(8, 8))

    @tf.function
    def gradients_of(a, b):
        with tf.GradientTape() as tape:
            loss = LOSS(b, model(a, training=True))
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def apply(gradients):
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @tf.function
    def all_steps(many, labels):
        for i in tf.range(8):
            apply(gradients_of(many[i], labels[i]))

    all_steps(*batches)
    put("weights", state(model, optimizer))


def part_of_the_ranks():
    """A process set: its members reduce among themselves, the last rank trains on its own. And runs repeat exactly."""
    members = hvd.add_process_set([0, 1])
    outcome = []
    for _ in range(2):
        model = mlp()
        optimizer = wrapped(keras.optimizers.Adam(0.01), process_set=members)
        train(model, optimizer, *data())
        outcome.append(state(model, optimizer))
    put("set", outcome)
    outcome = []
    for _ in range(2):
        model = mlp()
        optimizer = wrapped(keras.optimizers.Adam(0.01))
        train(model, optimizer, *data())
        outcome.append(state(model, optimizer))
    put("all", outcome)


def partial_batch():
    """Only rank 1's last batch is smaller, so only rank 1 traces the step a second time."""
    model = mlp()
    optimizer = wrapped()
    if KERAS_3:
        optimizer.build(model.trainable_variables)
    traces = []

    @tf.function
    def step(a, b):
        traces.append(a.shape[0])
        with tf.GradientTape() as tape:
            loss = LOSS(b, model(a, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    x, y = data()
    for i in range(0, 64, 8):
        size = 5 if RANK == 1 and i == 56 else 8
        step(tf.constant(x[i : i + size]), tf.constant(y[i : i + size]))
    put("traces", traces)
    put("weights", state(model, optimizer))


for current in sys.argv[1:]:
    globals()[current]()
