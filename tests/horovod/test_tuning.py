"""Tracing, planning and judging on real ranks: the values stay the same, and whatever cannot be done is said."""

from __future__ import annotations

import json
import shutil

import pytest

from tests import ranks
from tests.horovod.conftest import KERAS, KERAS_3
from tf_caramel import see
from tf_caramel.planner.plan import BodyPlan, Piece, Plan
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.record import ARMS, Record

MANY = "fifo,none"  # a plan of as many messages as gradients: another one than the static plan's


def start(folder, case, n=2, steps=80, **env):  # so many that five arms can be judged
    env = {"TF_CARAMEL": "1", "TF_CARAMEL_DEFER": "off", "STEPS": str(steps), **env}
    return ranks.start("tuning.py", case, n=n, env=env, folder=folder, limit_seconds=240)


def run(*args, **settings):
    return ranks.reports(start(*args, **settings))


@pytest.fixture(scope="session")
def untouched(folder):
    return {
        keras: run(folder, "plain", TF_CARAMEL="0", KERAS=keras)[0]["state"] for keras in KERAS
    }  # both ranks are compared where it is used


@pytest.fixture(scope="session")
def kept(folder):
    """The folder of a run with a cache, and its reports."""
    cache = folder / "kept"
    return cache, run(folder, "plain", TF_CARAMEL_CACHE=str(cache), TF_CARAMEL_PLAN=MANY)


def entry(cache):
    (found,) = cache.iterdir()
    return found


@pytest.mark.parametrize("keras", KERAS)
def test_what_is_deferred_when_plans_are_judged_changes_no_bit(folder, untouched, keras):
    one, other = run(folder, "plain", TF_CARAMEL_PLAN=MANY, KERAS=keras, TF_CARAMEL_DEFER="auto")
    assert one["state"] == other["state"] == untouched[keras]
    assert {"measured", "static", "traced"} <= set(one["measured"][0]) <= set(ARMS)
    assert one["arms"] == other["arms"]


@pytest.mark.parametrize("keras", KERAS)
def test_tracing_swapping_and_judging_change_no_bit(folder, untouched, keras):
    one, other = run(folder, "plain", TF_CARAMEL_PLAN=MANY, KERAS=keras)
    assert one["state"] == other["state"] == untouched[keras]
    assert one["measured"] == [["measured", "static", "traced"]]
    assert one["arms"] == other["arms"]
    assert one["plans"] == other["plans"]


def test_a_profile_a_plan_and_a_record_are_kept_by_one_rank(kept):
    cache, (one, _) = kept
    profile = Profile.from_json((entry(cache) / "profile.json").read_text())
    record = Record.from_json((entry(cache) / "record.json").read_text())
    assert len(profile.transfers) == 8
    assert profile.bytes_ == sum(4 * n for n in (12 * 64, 64, 64, 64, 64 * 64, 64, 64 * 4, 4))
    assert profile.compute_seconds > 0
    assert len(profile.network.samples) >= 4  # large messages too, however long building takes
    assert all(t.readers for t in profile.transfers if t.bytes_ > 1000)
    assert (record.key, [record.chosen], record.ranks) == (profile.key, one["arms"], 2)
    assert {arm: len(times) for arm, times in record.arms.items()} == {"measured": 6, "static": 6, "traced": 6}
    assert record.observed
    assert record.unmatched < 0.2


def test_the_report_in_the_process_is_that_of_the_folder(folder, kept):
    cache, (one, other) = kept
    table = str(see.report(cache))
    assert one["report"] == table
    assert "Horovod as it comes" in table
    assert "least slack" in table
    assert "ended before that" in other["report"]  # only the rank that plans has the profile


def test_a_second_run_begins_with_what_the_first_one_found(folder, kept, untouched):
    cache, _ = kept
    copy = folder / "second"
    shutil.copytree(cache, copy)
    record = json.loads((entry(copy) / "record.json").read_text())
    (entry(copy) / "record.json").write_text(json.dumps(record | {"chosen": "measured"}))
    messages = [[Piece(t.name)] for t in Profile.from_json((entry(copy) / "profile.json").read_text()).transfers]
    plan = Plan((BodyPlan(tuple(map(tuple, messages)), 1),), MANY)
    (entry(copy) / "plan.json").write_text(plan.to_json())
    one, other = run(folder, "plain", TF_CARAMEL_CACHE=str(copy), TF_CARAMEL_PLAN=MANY)
    assert (one["arms"], one["measured"], one["plans"]) == (["measured"], [[]], [plan.to_json()])
    assert one["state"] == other["state"] == untouched["keras"]


def test_a_function_that_was_fastest_as_traced_is_left_so_in_the_second_run(folder, kept, untouched):
    copy = folder / "as_traced"
    shutil.copytree(kept[0], copy)
    record = json.loads((entry(copy) / "record.json").read_text())
    (entry(copy) / "record.json").write_text(json.dumps(record | {"chosen": "traced"}))
    one, other = run(folder, "plain", TF_CARAMEL_CACHE=str(copy), TF_CARAMEL_PLAN=MANY)
    assert (one["arms"], one["plans"]) == (["traced"], [None])
    assert one["state"] == other["state"] == untouched["keras"]


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("plan.json", lambda text: text[: len(text) // 2], "plan.json: cut off or not JSON"),
        ("plan.json", lambda text: text.replace("_o0_3", "_o9_3"), "'HorovodAllreduce_caramel_o9_3' is not a gradient"),
        ("record.json", lambda text: text.replace('"traced_step_seconds":', '"traced_step_seconds":-'), "record.json"),
        ("record.json", lambda text: text.replace('"key":"', '"key":"0'), "is of another step"),
    ],
    ids=["truncated", "edited", "negative", "another step"],
)
def test_a_spoilt_cache_is_named_and_training_goes_on_with_the_static_plan(folder, kept, untouched, name, spoil, said):
    copy = folder / f"spoilt_{said.split()[0].strip(':')}_{len(said)}"
    shutil.copytree(kept[0], copy)
    record = json.loads((entry(copy) / "record.json").read_text())
    (entry(copy) / "record.json").write_text(json.dumps(record | {"chosen": "static"}, separators=(",", ":")))
    if not (entry(copy) / "plan.json").exists():
        names = [t.name for t in Profile.from_json((entry(copy) / "profile.json").read_text()).transfers]
        (entry(copy) / "plan.json").write_text(Plan((BodyPlan(tuple((Piece(n),) for n in names)),)).to_json())
    file = entry(copy) / name
    file.write_text(spoil(file.read_text()))
    one, other = run(folder, "plain", steps=4, TF_CARAMEL_CACHE=str(copy), TF_CARAMEL_PLAN=MANY)
    assert one["arms"] == other["arms"] == ["static"]
    assert any("the static plan was used" in why and said in why for why in one["why"][0]), one["why"]
    assert one["why"] == other["why"]


def test_a_plan_of_one_s_own_with_chunks_edges_and_a_window_changes_no_bit(folder, kept, untouched):
    names = [t.name for t in Profile.from_json((entry(kept[0]) / "profile.json").read_text()).transfers]
    large = max(names, key=lambda n: {"HorovodAllreduce_caramel_o0_4": 1}.get(n, 0))
    rest = [n for n in names if n != large]
    batches = ((Piece(rest[0]), Piece(large, 2, 3)), (Piece(large, 0, 3),), *((Piece(n),) for n in rest[1:]))
    plan = Plan((BodyPlan((*batches, (Piece(large, 1, 3),)), 2),))
    (folder / "own.json").write_text(plan.to_json())
    one, other = run(folder, "plain", TF_CARAMEL_PLAN=str(folder / "own.json"))
    assert one["plans"] == other["plans"] == [plan.to_json()]
    assert one["state"] == other["state"] == untouched["keras"]


def test_a_plan_of_another_model_is_refused_by_name_and_the_static_one_runs(folder):
    (folder / "other.json").write_text(Plan((BodyPlan(((Piece("conv1"),),)),)).to_json())
    one, other = run(folder, "plain", steps=4, TF_CARAMEL_PLAN=str(folder / "other.json"))
    assert one["arms"] == other["arms"] == ["static"]
    assert "other.json: bodies[0].batches[0]: 'conv1' is not a gradient of this step" in one["why"][0][0]


def test_several_steps_in_one_call_are_measured_as_steps(folder):
    cache = folder / "several"
    env = {"TF_CARAMEL_CACHE": str(cache), "TF_CARAMEL_PLAN": MANY}
    one, other = run(folder, "several_steps_a_call", steps=100, **env)
    assert one["state"] == other["state"]
    record = Record.from_json((entry(cache) / "record.json").read_text())
    call = record.median("static")
    assert record.traced_step_seconds < call  # a call holds two


def test_functions_traced_for_other_shapes_on_other_ranks_share_the_step(folder):
    env = {"TF_CARAMEL_PLAN": MANY}
    untouched, _ = run(folder, "loop", TF_CARAMEL="0")
    one, other = run(folder, "loop", **env)
    assert one["state"] == other["state"] == untouched["state"]
    assert one["measured"] == other["measured"] == [["measured", "static", "traced"]], one["why"]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("other_graph_on_one_rank", "ranks 0 and 1 run different graphs"),
        ("seeded_random_op", "is a seeded random op, whose sequence would begin again"),
        ("own_profiler", "TensorFlow's tracer does not start"),
    ],
)
def test_what_cannot_be_measured_is_said_and_training_goes_on(folder, case, why):
    plain, _ = run(folder, case, TF_CARAMEL="0", FOLDER=str(folder))
    one, other = run(folder, case, TF_CARAMEL_PLAN=MANY, FOLDER=str(folder))
    assert one["state"] == other["state"] == plain["state"]
    assert any(why in text for text in one["why"][0]), one["why"]
    assert "measured" not in one["measured"][0]
    if case == "seeded_random_op":
        assert one["arms"] == ["traced"]


def test_three_ranks_with_op_determinism_repeat_exactly_and_keep_their_first_plan(folder):
    runs = [run(folder, "deterministic", n=3, TF_CARAMEL_PLAN=MANY) for _ in range(2)]
    assert len({r["state"] for rank in runs for r in rank}) == 1
    assert runs[0][0]["arms"] == ["static"]
    assert "op determinism is asked for" in runs[0][0]["why"][0][0]


def test_a_step_that_takes_longer_than_before_is_measured_again(folder):
    done = start(folder, "drift", steps=200, TF_CARAMEL_PLAN=MANY)
    one, other = ranks.reports(done)
    assert one["state"] == other["state"]
    assert not [rank for rank in done if "retracing" in rank.log]  # what TensorFlow warns of
    again = [line for line in one["log"] if "is measured again: the step from" in line]
    assert again
    assert one["arms"] == other["arms"]


def test_no_steps_traced_means_nothing_measured(folder):
    one, _ = run(folder, "plain", TF_CARAMEL_TRACE_STEPS="0")
    assert (one["arms"], one["measured"]) == (["static"], [[]])


@pytest.mark.skipif(not KERAS_3, reason="one of the two TensorFlows is enough")
def test_ranks_with_other_policies_are_told(folder):
    env = {"TF_CARAMEL": "1", "STEPS": "4"}
    per_rank = [{"TF_CARAMEL_PLAN": "caramel,adaptive"}, {"TF_CARAMEL_PLAN": "tac,mgwfbp"}]
    done = ranks.start("tuning.py", "plain", env=env, per_rank=per_rank, folder=folder, limit_seconds=120)
    for rank in done:
        assert rank.code
        assert "TF_CARAMEL_PLAN: 'caramel,adaptive' against 'tac,mgwfbp'" in rank.log
