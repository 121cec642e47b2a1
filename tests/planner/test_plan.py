"""The plan as data: JSON and back, digests, and where two pieces of plain data differ."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tf_caramel.planner.plan import Plan, digest, first_difference

PLAN = Plan((((0, 2), (1,)), (), ((0,),)))


@pytest.mark.parametrize("plan", [PLAN, Plan(()), Plan(((),))])
def test_a_plan_survives_json(plan: Plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_in_json_is_short():
    assert PLAN.to_json() == '{"batches":[[[0,2],[1]],[],[[0]]]}'


def test_a_digest_is_the_start_of_the_sha256_of_sorted_json():
    text = b'{"a": [1, "x", null], "b": 2.0}'
    assert digest({"b": 2.0, "a": (1, "x", None)}) == hashlib.sha256(text).hexdigest()[:10]


def test_equal_plans_have_equal_digests():
    assert Plan.from_json(PLAN.to_json()).digest == PLAN.digest


@pytest.mark.parametrize("batches", [(((2, 0), (1,)), (), ((0,),)), (((1,), (0, 2)), (), ((0,),)), ()])
def test_another_order_of_members_or_batches_has_another_digest(batches: Any):
    assert Plan(batches).digest != PLAN.digest


def test_a_digest_does_not_depend_on_the_order_of_mappings():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})


def test_a_digest_depends_on_the_order_of_lists():
    assert digest([1, 2]) != digest([2, 1])


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({"op": "Sum"}, {"op": "Average"}, "op: 'Sum' against 'Average'"),
        ({"options": {"op": "Sum"}}, {"options": {"op": "Min"}}, "options.op: 'Sum' against 'Min'"),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, "a[1].b: 2 against 3"),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], "[1][1]: 4 against 5"),
        ({"a": [1, 2]}, {"a": [1]}, "a: 2 of them against 1"),
        ({"a": 1}, {}, "a: 1 against nothing"),
        ({}, {"a": 1}, "a: nothing against 1"),
        ({"a": [1]}, {"a": "1"}, "a: [1] against '1'"),
        ({"a": "xy"}, {"a": "xz"}, "a: 'xy' against 'xz'"),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, "a: 1 against 2"),
    ],
)
def test_the_first_difference_is_named_with_its_path(a: Any, b: Any, found: str):
    assert first_difference(a, b) == found


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1, "b": [2, None]}, {"b": [2, None], "a": 1}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        ("x", "x"),
        ([], []),
    ],
)
def test_equal_data_has_no_difference(a: Any, b: Any):
    assert first_difference(a, b) is None


@pytest.mark.parametrize(("a", "b"), [({"a": None}, {}), ({"a": 1}, {"a": 1.0}), ({"a": 1}, {"a": True})])
def test_data_with_two_digests_has_a_difference(a: Any, b: Any):
    assert digest(a) != digest(b)
    assert first_difference(a, b) is not None
