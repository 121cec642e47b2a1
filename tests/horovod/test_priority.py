"""Horovod's threads go before computing while a plan runs: those and no others, and only where it is allowed."""

from __future__ import annotations

import os

import pytest

from tests import ranks
from tf_caramel.runtime import priority

MANY = "fifo,none"  # a plan of as many messages as gradients: another one than the static plan's

OBSTACLE = priority.obstacle()
needs_permission = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become nobody")


def run(folder, case, **env):
    env = {"TF_CARAMEL": "1", "TF_CARAMEL_PLAN": MANY, "TF_CARAMEL_PRIORITY": "auto", **env}
    return ranks.reports(ranks.start("priority.py", case, env=env, folder=folder, limit_seconds=200))


@needs_permission
def test_horovods_threads_go_first_while_a_plan_runs_and_not_as_traced(tmp_path):
    for rank in run(tmp_path, "train"):
        first = rank["found"][0]  # the static plan's
        assert len(first) == 2
        assert set(first) <= set(rank["horovods"])  # a third one has nothing to do once all have met
        assert {tuple(found) for found in rank["found"]} == {(), tuple(first)}
        assert rank["found"][-1] == ([] if rank["chosen"] == "traced" else first)
        assert not [text for text in rank["why"] if "Horovod's threads" in text]


@needs_permission
def test_threads_of_a_horovod_that_was_initialised_anew_are_found(tmp_path):
    for rank in run(tmp_path, "anew"):
        assert len(rank["first"]) == len(rank["anew first"]) == 2
        assert set(rank["first"]) <= set(rank["horovods"])
        assert set(rank["anew first"]) <= set(rank["anew horovods"])
        assert not set(rank["horovods"]) & set(rank["anew horovods"])
        assert rank["like all others"] == []


def test_off_changes_no_priority(tmp_path):
    for rank in run(tmp_path, "train", TF_CARAMEL_PRIORITY="off"):
        assert {tuple(found) for found in rank["found"]} == {()}
        assert not [text for text in rank["why"] if "Horovod's threads" in text]


@needs_root
def test_where_it_is_not_allowed_training_goes_on_and_the_report_says_how_to_allow_it(tmp_path):
    for rank in run(tmp_path, "train", NOBODY="1"):
        assert {tuple(found) for found in rank["found"]} == {()}
        (text,) = [text for text in rank["why"] if "Horovod's threads" in text]
        assert "--cap-add SYS_NICE" in text
