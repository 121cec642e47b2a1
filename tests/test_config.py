"""The environment variables: what they mean, and that a bad one is an error that names it and its value."""

from __future__ import annotations

import pytest

from graph_passes import manager
from tf_caramel.config import Config, ConfigError, load


def refused(name: str, value: str) -> str:
    with pytest.raises(ConfigError) as error:
        load({name: value})
    return str(error.value)


def test_without_variables_everything_has_its_default():
    pipeline = "inline,untie,chunk,regroup(cap=8MB),order(window=1),schedule,defer"
    assert load({"PATH": "/bin"}) == Config(False, pipeline, "caramel,adaptive", 5, None, None, 25.0)


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", "TRUE", " On "])
def test_these_values_turn_rewriting_on(value: str):
    assert load({"TF_CARAMEL": value}).enabled


@pytest.mark.parametrize("value", ["", "0", "false", "off", "no", "OFF", " "])
def test_these_values_turn_rewriting_off(value: str):
    assert not load({"TF_CARAMEL": value}).enabled


@pytest.mark.parametrize("value", ["2", "maybe", "TF_CARAMEL=1"])
def test_another_value_of_the_flag_is_refused(value: str):
    assert refused("TF_CARAMEL", value) == f"TF_CARAMEL={value!r}: use 1 (on) or 0 (off)"


def test_an_unknown_variable_is_refused_with_the_nearest_known_one():
    unknown = "TF_CARAMEL_PIPELIN is not a variable of this version of tf_caramel; did you mean TF_CARAMEL_PIPELINE?"
    assert refused("TF_CARAMEL_PIPELIN", "") == unknown


def test_an_unknown_variable_unlike_any_is_refused_with_all_known_ones():
    names = ("", "_PIPELINE", "_PLAN", "_TRACE_STEPS", "_CACHE", "_DUMP", "_TIMEOUT", "_DEFER", "_PRIORITY")
    known = ", ".join(f"TF_CARAMEL{name}" for name in names)
    assert refused("TF_CARAMEL_ZZZZZZZZZZZZZZZZZZZZZZZZZZ", "1").endswith(f"known are {known}")


def test_variables_of_other_programs_are_not_looked_at():
    assert load({"TF_CARAMELIZE": "x", "MY_TF_CARAMEL": "x"}) == Config()


def test_a_pipeline_is_taken_as_it_is_written():
    assert load({"TF_CARAMEL_PIPELINE": " inline,order "}).pipeline == "inline,order"


def test_an_empty_pipeline_is_the_default():
    assert load({"TF_CARAMEL_PIPELINE": " "}).pipeline == manager.DEFAULT


def test_a_bad_pipeline_is_refused_with_the_manager_s_reason():
    reason = "no pass is called 'sort'; there are inline, untie, chunk, regroup, order, schedule, defer"
    assert refused("TF_CARAMEL_PIPELINE", "inline,sort") == f"TF_CARAMEL_PIPELINE='inline,sort': {reason}"


@pytest.mark.parametrize("value", ["tac,mgwfbp", "fifo,fixed:8MB,window=2", "static"])
def test_a_plan_is_policies_or_static(value: str):
    assert load({"TF_CARAMEL_PLAN": value}).plan == value


def test_a_pipeline_of_one_s_own_stays_unless_a_plan_is_asked_for_too():
    own = {"TF_CARAMEL_PIPELINE": "inline,regroup(cap=1MB),order"}
    assert load(own).plan == "static"
    assert load(own | {"TF_CARAMEL_PLAN": "fifo,none"}).plan == "fifo,none"


@pytest.mark.parametrize(
    ("value", "reason"), [("caramel", "the batches are missing"), ("first,adaptive", "'first' is not an order"),
                          ("gone.json", "there is no such file")]
)  # fmt: skip
def test_a_bad_plan_is_refused_and_the_reason_named(value: str, reason: str):
    assert reason in refused("TF_CARAMEL_PLAN", value)


def test_what_is_measured_follows_from_plan_and_steps(tmp_path):
    (tmp_path / "plan.json").touch()
    assert load({}).measures
    assert not load({"TF_CARAMEL_TRACE_STEPS": "0"}).measures
    assert not load({"TF_CARAMEL_PLAN": "static"}).measures
    assert not load({"TF_CARAMEL_PLAN": str(tmp_path / "plan.json")}).measures


@pytest.mark.parametrize("value", ["-1", "five", "1.5", "1001"])
def test_a_bad_number_of_steps_is_refused(value: str):
    wanted = "use a number of steps, 0 (never measure) to 1000"
    assert refused("TF_CARAMEL_TRACE_STEPS", value) == f"TF_CARAMEL_TRACE_STEPS={value!r}: {wanted}"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/tf_caramel/plans"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/tf_caramel/plans"),
        ({"HOME": "/h", "TF_CARAMEL_CACHE": "/c"}, "/c"),
        ({"HOME": "/h", "TF_CARAMEL_CACHE": "off"}, None),
        ({}, None),
    ],
)
def test_the_cache_is_a_folder_or_off(variables: dict[str, str], folder: str | None):
    assert load(variables).cache == folder


@pytest.mark.parametrize(("value", "seconds"), [("10", 10.0), (" 0.5 ", 0.5), ("", 25.0)])
def test_a_timeout_is_a_number_of_seconds(value: str, seconds: float):
    assert load({"TF_CARAMEL_TIMEOUT": value}).timeout_seconds == seconds


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e999", "soon", "5s"])
def test_a_timeout_that_is_no_number_of_seconds_above_0_is_refused(value: str):
    assert refused("TF_CARAMEL_TIMEOUT", value) == f"TF_CARAMEL_TIMEOUT={value!r}: use a number of seconds above 0"


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("TF_CARAMEL_DEFER", "auto, off, within, across"), ("TF_CARAMEL_PRIORITY", "off, auto")],
)
def test_a_word_that_is_not_one_of_those_allowed_is_refused(name: str, allowed: str):
    assert refused(name, "sometimes") == f"{name}='sometimes': use one of {allowed}"


def test_words_may_be_written_in_capitals():
    assert load({"TF_CARAMEL_DEFER": " OFF ", "TF_CARAMEL_PRIORITY": "Auto"}) == Config(defer="off", priority="auto")


@pytest.mark.parametrize(("value", "folder"), [("/tmp/graphs", "/tmp/graphs"), ("", None)])
def test_dump_names_a_folder(value: str, folder: str | None):
    assert load({"TF_CARAMEL_DUMP": value}).dump == folder


def test_the_process_s_own_variables_are_read_when_none_are_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TF_CARAMEL_TIMEOUT", "7")
    assert load().timeout_seconds == 7.0
