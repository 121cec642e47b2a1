"""Judging: the arm with the shortest median step is chosen, from what all ranks saw."""

from __future__ import annotations

from tf_caramel.runtime.tuner import _judge


def test_the_shortest_median_is_chosen():
    shown = {0: {"measured": [3.0, 1.0, 2.0], "traced": [1.5, 9.0, 1.0]}}
    assert _judge(shown)["chosen"] == "traced"
    assert _judge(shown)["median"] == {"measured": 2.0, "traced": 1.5}


def test_a_call_takes_the_mean_of_what_the_ranks_saw():
    shown = {1: {"measured": [2.0], "traced": [1.0]}, 0: {"measured": [1.0], "traced": [2.5]}}
    verdict = _judge(shown)
    assert (verdict["chosen"], verdict["seconds"]) == ("measured", {"measured": [1.5], "traced": [1.75]})


def test_of_equals_the_first_is_chosen():
    assert _judge({0: {"measured": [1.0], "static": [1.0]}})["chosen"] == "measured"
