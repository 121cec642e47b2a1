"""Same on every rank, never worse off, never a silent hang: order of submission, mismatches, failing passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from graph_passes import manager
from tests import ranks
from tests.horovod.conftest import KERAS, KERAS_2

ON = {"TF_CARAMEL": "1"}


def orders(log: str) -> list[tuple[str, ...]]:
    """What was enqueued in each step after the first, from Horovod's trace log."""
    steps = re.split(r"(?m)^STEP \d+", log)[1:-1]
    return [
        tuple(re.findall(r"Enqueued (?:tensors for \w+: )?([^\[\n]*?);? *(?=\[|$)", step, re.MULTILINE))
        for step in steps
    ]


def trace(tmp_path, **env):
    env = {"HOROVOD_LOG_LEVEL": "trace", "KERAS": KERAS[-1], **env}
    done = ranks.start("order.py", env=env, folder=tmp_path)
    ranks.reports(done)
    return [orders(rank.log) for rank in done]


def test_batches_are_enqueued_in_one_order_on_every_rank_at_every_step(tmp_path):
    one, other = trace(tmp_path, TF_CARAMEL="1", TF_CARAMEL_PIPELINE="inline,regroup(cap=32KB),order(window=1)")
    assert len(one) == 15
    assert len(one[0]) > 5
    assert set(one) == set(other) == {one[0]}


def test_without_rewriting_the_order_changes_from_step_to_step(tmp_path):
    one, other = trace(tmp_path)  # shows that the test above can fail
    assert len(one) == 15
    assert len(set(one) | set(other)) > 1


def disagreement(tmp_path, what, n=2, per_rank=(), **env):
    done = ranks.start("disagree.py", what, n=n, env={**ON, **env}, per_rank=per_rank, folder=tmp_path)
    for rank in done:
        assert rank.code not in (0, None), rank.log[-3000:]
        assert float(re.search(r"ENDED after ([\d.]+) s", rank.log)[1]) < 30
    return [re.search(r"AgreementError: (tf_caramel, .*)", rank.log)[1] for rank in done]


@pytest.mark.parametrize("on_rank", [0, 1])
def test_the_flag_on_one_rank_only_is_an_error_that_names_it(tmp_path, on_rank):
    per_rank = [{"TF_CARAMEL": str(int(rank == on_rank))} for rank in range(2)]
    for text in disagreement(tmp_path, "flag", per_rank=per_rank):
        assert f"rank 0 and rank 1 differ in TF_CARAMEL: {1 - on_rank} against {on_rank}" in text


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("groups", "rank 0 and rank 1 differ in options.groups: 2 against None"),
        ("model", "rank 0 and rank 1 differ in gradients[0]: 'float32[12,16]' against 'float32[12,20]'"),
    ],
)
def test_options_or_models_that_differ_are_an_error_on_every_rank(tmp_path, what, difference):
    for text in disagreement(tmp_path, what):
        assert difference in text


def test_pipelines_that_differ_are_an_error_on_every_rank(tmp_path):
    per_rank = [{}, {"TF_CARAMEL_PIPELINE": "inline,order"}]
    for text in disagreement(tmp_path, "pipeline", per_rank=per_rank):
        assert f"TF_CARAMEL_PIPELINE: {manager.DEFAULT!r} against 'inline,order'" in text


def test_without_the_launchers_store_ranks_still_agree_or_fail(tmp_path):
    env = {"TEST_NO_STORE": "1"}
    for text in disagreement(tmp_path, "option", **env):
        assert "options.compression" in text
    one, other = ranks.reports(ranks.start("cases.py", "train_sgd", env={**ON, **env}, folder=tmp_path))
    assert one == other


def test_a_rank_that_never_arrives_is_named_and_the_job_ends(tmp_path):
    """Through horovodrun, which ends the late rank once another has failed."""
    horovodrun = Path(sys.executable).with_name("horovodrun")
    env = ["env", "TF_CARAMEL=1", "TF_CARAMEL_TIMEOUT=6", f"PYTHONPATH={ranks.ROOT}", "TF_CPP_MIN_LOG_LEVEL=3"]
    worker = str(ranks.WORKERS / "disagree.py")
    command = [*env, str(horovodrun), "-np", "2", sys.executable, "-u", worker, "late"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "rank 1 did not arrive at 'optimizer-0.all.0' within 6 s" in output
    assert float(re.search(r"ENDED after ([\d.]+) s", output)[1]) < 10


@pytest.mark.parametrize("broken", ["inline", "regroup"])  # before and after the plan is agreed on
def test_a_pass_that_fails_on_one_rank_leaves_the_function_as_traced_on_all(tmp_path, shared, broken):
    keras = KERAS[-1]  # Keras 2 traces the step twice
    done = ranks.start("cases.py", "failing_pass", env={**ON, "KERAS": keras, "BROKEN": broken}, folder=tmp_path)
    ranks.reports(done)
    for rank in done:
        assert list(rank.report.values()) == list(shared(keras)[0].of("train_sgd").values())
        lines = [line for line in rank.log.splitlines() if "left as traced" in line]
        assert lines
        assert f"rank 1: PassError: pass {broken} failed: boom" in lines[0]
        assert "rewritten in" not in rank.log


def test_a_step_traced_again_on_one_rank_only_keeps_its_plan(case):
    one, other = case("partial_batch")
    assert len(other["traces"]) > len(one["traces"])
    assert one["weights"] == other["weights"]


def test_jit_compile_is_refused_with_the_remedy(tmp_path):
    for rank in ranks.start("cases.py", "compiled", env=ON, folder=tmp_path):
        assert rank.code == 1
        assert "pass jit_compile=False to compile()" in rank.log


@pytest.mark.parametrize("keras", KERAS_2)
def test_a_compiled_step_with_horovods_optimizer_is_left_alone_with_one_warning(tmp_path, keras):
    env = {**ON, "HVD": "1", "KERAS": keras}
    for rank in ranks.start("cases.py", "compiled", env=env, folder=tmp_path):
        assert rank.code == 1  # as without us: Horovod has no XLA kernels
        assert rank.log.count("is compiled by XLA (jit_compile=True) and left alone") == 1


def test_on_one_rank_nothing_is_rewritten_and_nothing_exchanged(tmp_path):
    done = ranks.start("cases.py", "nothing_to_do", n=1, env=ON, folder=tmp_path)
    ranks.reports(done)
    only = done[0].of("nothing_to_do")
    assert "_caramel_" not in only["plain"] + only["step"]
    assert only["collectives"] == 0


def test_a_function_without_collectives_is_not_rewritten(case):
    for report in case("nothing_to_do"):
        assert "_caramel_" not in report["plain"]
        assert "_caramel_" in report["step"]
        assert report["collectives"] == 1


def test_a_loss_scale_belongs_inside_the_wrapper_and_is_refused_outside(case):
    one, other = case("loss_scale")
    assert one == other
    assert one["refused"] is True


def test_dumped_graphs_show_each_pass(tmp_path):
    dump = tmp_path / "dump"
    env = {**ON, "TF_CARAMEL_DUMP": str(dump)}
    ranks.reports(ranks.start("cases.py", "train_sgd", env=env, folder=tmp_path))
    for rank in range(2):
        for label, op in {"before": "HorovodAllreduce", "after_regroup": "HorovodGroupedAllreduce"}.items():
            graphs = [path.read_text() for path in (dump / f"rank{rank}").glob(f"*/{label}.pbtxt")]
            assert any(f'op: "{op}"' in graph for graph in graphs)
        assert list((dump / f"rank{rank}").glob("*/after_inline.pbtxt"))
        assert list((dump / f"rank{rank}").glob("*/after_order.pbtxt"))


def test_twelve_hundred_small_tensors_travel_in_few_messages_without_cache_evictions(tmp_path):
    done = ranks.start("cases.py", "many_tensors", env=ON, folder=tmp_path, limit_seconds=300)
    one, other = ranks.reports(done)
    assert one == other
    assert done[0].of("many_tensors")["distance"] < 1e-6
    for rank in done:
        assert "'collectives merged': 1200, 'batches': 1" in rank.log
        assert "evict" not in rank.log
