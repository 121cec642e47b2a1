"""Ranks that do not agree: what differs is named on the command line. Every rank must end with an error, soon."""

import sys
import time

from common import RANK, data, hvd, keras, mlp, tf_caramel

what = sys.argv[1]
options = {}
model = mlp(width=16 + 4 * (what == "model" and RANK))
if what == "option" and RANK == 1:
    options["compression"] = hvd.Compression.fp16
if what == "groups" and RANK == 0:
    options["groups"] = 2
if what == "late" and RANK == 1:
    time.sleep(600)
optimizer = keras.optimizers.SGD(0.1) if what == "unwrapped" and RANK == 0 else None
optimizer = optimizer or tf_caramel.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
print("START", flush=True)
began = time.time()
try:
    model.fit(*data(), batch_size=8, verbose=0)
finally:
    print(f"ENDED after {time.time() - began:.1f} s", flush=True)
if what == "unwrapped":
    time.sleep(60)
