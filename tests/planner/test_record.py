"""The record as data: JSON and back, and what it says of a file that cannot be used."""

from __future__ import annotations

import json

import pytest

from tf_caramel.planner.profile import InputError
from tf_caramel.planner.record import FORMAT, Observed, Record

FULL = Record(
    key="a1b2",
    function="train_step",
    ranks=2,
    origin="caramel,adaptive",
    chosen="measured",
    arms={"measured": (0.5, 1.0, 0.25), "traced": (1.0, 0.5)},
    traced_step_seconds=0.6,
    trace_cost=0.02,
    observed=(Observed("batch0", 4096, 0.25, 0.5),),
    unmatched=0.01,
    why=("The embedding's gradient is sparse.",),
)
LEAST = {"format": FORMAT, "key": "a1b2", "function": "train_step"}


def test_a_record_survives_json():
    assert Record.from_json(FULL.to_json()) == FULL


def test_a_run_that_ended_early_leaves_a_record_all_the_same():
    early = Record.from_json(json.dumps(LEAST))
    assert early == Record("a1b2", "train_step")
    assert Record.from_json(early.to_json()) == early
    assert early.median("measured") is None


def test_an_arm_has_a_median():
    assert (FULL.median("measured"), FULL.median("traced"), FULL.median("static")) == (0.5, 0.75, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "tf_caramel plan 1"}, "format: 'tf_caramel plan 1'"),
        ({"function": None}, "function: None, but it must be text"),
        ({"ranks": 0}, "ranks: 0"),
        ({"chosen": "best"}, "chosen: 'best', but it must be one of deferred, loose, measured, static, traced"),
        ({"arms": {"best": [1.0]}}, "arms: 'best'"),
        ({"arms": {"static": [1.0, -1.0]}}, r"arms.static: \[1.0, -1.0\]"),
        ({"arms": {"static": [True]}}, r"arms.static: \[True\]"),
        ({"trace_cost": -0.1}, "trace_cost: -0.1"),
        ({"observed": {}}, "observed: {}"),
        ({"observed": [["m", 1, 0.0, 1.0], ["m", "1", 0.0, 1.0]]}, r"observed\[1\]: \['m', '1', 0.0, 1.0\]"),
        ({"observed": [["m", 1, 2.0, 1.0]]}, r"observed\[0\]: 'm' is done before it starts"),
        ({"why": "because"}, "why: 'because'"),
    ],
)
def test_a_field_that_cannot_be_is_named(change, said):
    with pytest.raises(InputError, match=f"^run/record.json: {said}"):
        Record.from_json(json.dumps(LEAST | change), "run/record.json")


def test_a_record_that_was_cut_off_says_so():
    with pytest.raises(InputError, match="record: cut off or not JSON"):
        Record.from_json(FULL.to_json()[:50])
