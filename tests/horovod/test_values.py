"""Same values: what training computes is the same, bit for bit, whether functions are rewritten or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import ranks
from tests.horovod.conftest import KERAS, KERAS_2, KERAS_3, SMALL


def run(tmp_path, *cases, n=2, **env):
    done = ranks.start("cases.py", *cases, n=n, env=env, folder=tmp_path, limit_seconds=240)
    ranks.reports(done)
    return done


@pytest.mark.parametrize("keras", KERAS)
def test_every_optimizer_and_way_of_training_gives_the_bits_of_the_untouched_run(matrix, keras):
    """Untouched: Horovod's own optimizer where it works, else (Keras 3) ours with rewriting off."""
    plain = matrix(keras, hvd=keras in KERAS_2, rewritten=False)
    rewritten = matrix(keras, hvd=False, rewritten=True)
    assert len(rewritten[0]) == 20
    assert rewritten[0] == rewritten[1]
    assert plain[0] == plain[1]
    for key, bits in rewritten[0].items():
        assert bits == plain[0].get(key, plain[0][key.replace("train_step", "plain")]), key


@pytest.mark.parametrize("keras", KERAS_2)
def test_horovods_own_optimizer_and_tape_give_the_bits_of_their_untouched_run(matrix, keras):
    plain = matrix(keras, hvd=True, rewritten=False)
    rewritten = matrix(keras, hvd=True, rewritten=True)
    assert len(plain[0]) == 15
    assert plain[0] == plain[1] == rewritten[0] == rewritten[1]


def test_a_custom_train_step_is_reduced_once_and_equals_one_process_on_the_joined_batch(case):
    one, other = case("joined_batch")
    assert one["weights"] == other["weights"]
    assert one["distance"] < 1e-6


def test_a_branch_in_one_ranks_model_changes_nothing(case):
    one, other = case("branch_on_one_rank")
    assert one == other


@pytest.mark.parametrize("keras", KERAS_2)
def test_a_branch_in_one_ranks_model_is_harmless_with_horovods_optimizer_too(tmp_path, keras):
    env = {"TF_CARAMEL": "1", "HVD": "1", "KERAS": keras}  # plain Horovod hangs here
    one, other = ranks.reports(ranks.start("cases.py", "branch_on_one_rank", env=env, folder=tmp_path))
    assert one == other


def test_dense_before_sparse_works_with_and_without_groups(case):
    one, other = case("dense_before_sparse")
    assert one == other
    assert one["groups"] == one["plain"]
    assert one["dense distance"] < 1e-6
    assert one["both distance"] < 1e-6


def test_reduction_options_mean_what_horovod_says(case):
    one, other = case("reduction_options")
    assert (
        one
        == other
        == {
            "average": -1.5,
            "sum": -3.0,
            "predivide": -1.5,
            "fp16": -1.5,
            "groups": -1.5,
            "fp16 underflow": [[0.0]],
            "sparse average": [[-0.5], [-1.0], [-2.0]],
            "sparse sum": [[-1.0], [-2.0], [-4.0]],
            "sparse as dense": [[-0.5], [-1.0], [-2.0]],
            "sparse predivide": [[-0.5], [-1.0], [-2.0]],
            "none": [0.0],
        }
    )


def test_wrapping_keeps_class_state_schedule_and_exclusions(case):
    one, other = case("keeps_state")
    assert one == other
    assert (one["kept"], one["same state"], one["still excluded"]) == (True, True, True)
    assert (one["iterations"], one["iterations after"]) == (2, 10)


def test_a_saved_model_resumes_exactly_and_loads_without_horovod_and_without_us(tmp_path):
    env = {"TF_CARAMEL": "1", "FOLDER": str(tmp_path)}
    one, other = (r.of("save_and_resume") for r in run(tmp_path, "save_and_resume", **env))
    assert (one["iterations"], one["keras iterations"], one["h5 iterations"]) == (4, 4, 4)
    assert one["keras"] == one["unbroken"] == other["unbroken"]
    assert one.get("h5", one["unbroken"]) == one["unbroken"]
    assert ("h5" in one) is not KERAS_3
    script = f"""
import sys
for name in ("horovod", "tf_caramel"):
    sys.modules[name] = None  # importing it now raises
import keras
models = [keras.models.load_model(r"{tmp_path}/model-0." + kind) for kind in ("keras", "h5")]
models.append(keras.models.clone_model(models[0]))
models[2].load_weights(r"{tmp_path}/0.weights.h5")
from tests.report import digest
print(*[digest(m.get_weights()) for m in models], *[type(m.optimizer).__name__ for m in models[:2]])
"""
    env = {**os.environ, "PYTHONPATH": str(ranks.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [one["saved"]] * 3 + ["Adam"] * 2, done.stderr[-2000:]


def test_callbacks_give_equal_weights_equal_metrics_and_a_ramp(case):
    one, other = case("keras_callbacks")
    assert one == other
    assert one["rates"] == pytest.approx([0.2 + 0.2 * (i + 1) / 8 for i in range(8)] + [0.4] * 4)
    assert set(one["history"]) == {"accuracy", "loss", "lr", "val_accuracy", "val_loss"}


@pytest.mark.parametrize("keras", KERAS)
def test_collectives_in_nested_functions_and_loops_are_rewritten_and_exact(matrix, shared, keras):
    plain = matrix(keras, hvd=keras in KERAS_2, rewritten=False)[0]["Adam plain"]
    for rank in shared(keras):
        assert rank.of("nested_functions")["weights"] == plain
        assert re.search(r"__inference_all_steps_\d+ rewritten in .*'calls inlined': [1-9]", rank.log)


def test_three_ranks_repeat_exactly_and_a_process_set_trains_on_its_own(tmp_path):
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **SMALL}
    first = [r.of("part_of_the_ranks") for r in run(tmp_path, "part_of_the_ranks", n=3, **env)]
    again = [r.of("part_of_the_ranks") for r in run(tmp_path, "part_of_the_ranks", n=3, **env)]
    assert first == again  # with three ranks a changed order of summation shows
    assert first[0]["all"] == first[1]["all"] == first[2]["all"]
    assert first[0]["all"][0] == first[0]["all"][1]
    assert first[0]["set"] == first[1]["set"] != first[2]["set"]
