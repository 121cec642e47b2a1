"""The plan as data: JSON and back, what is wrong with one that cannot be used, digests, and first differences."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_caramel.planner.plan import BodyPlan, Piece, Plan, check, digest, first_difference
from tf_caramel.planner.profile import InputError

A, B = Piece("a"), Piece("b")
HALVES = (Piece("c", 0, 2), Piece("c", 1, 2))
BODY = BodyPlan(((A, B), HALVES[:1], HALVES[1:]), window=2, edges=(("x", "y"),))
PLAN = Plan((BODY, BodyPlan(())), origin="caramel,adaptive")
KINDS: list[dict[str, str | None]] = [{"a": "float32", "b": "float32", "c": "float32"}, {}]


def error_of(text: str) -> str:
    with pytest.raises(InputError) as error:
        Plan.from_json(text, "p.json")
    return str(error.value)


def changed(**fields: Any) -> str:
    """PLAN's file with other values in its first body."""
    data = json.loads(PLAN.to_json())
    data["bodies"][0] |= fields
    return json.dumps(data)


@pytest.mark.parametrize("plan", [PLAN, Plan(()), Plan((BodyPlan(()),))])
def test_a_plan_survives_json(plan: Plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_in_json_is_short():
    body = '{"batches":[["a","b"],["c[0/2]"],["c[1/2]"]],"window":2,"edges":[["x","y"]]}'
    empty = '{"batches":[],"window":1,"edges":[]}'
    head = '{"format":"tf_caramel plan 1","origin":"caramel,adaptive"'
    assert PLAN.to_json() == f'{head},"bodies":[{body},{empty}]}}'


@pytest.mark.parametrize("piece", [A, *HALVES, Piece("x[3]", 1, 3), Piece("a/b:0")])
def test_a_piece_survives_text(piece: Piece):
    assert Piece.parse(str(piece)) == piece


@given(st.integers(0, 1000), st.integers(1, 20))
def test_the_parts_of_a_gradient_are_nearly_equal_and_hold_all_bytes(whole: int, parts: int):
    sizes = [Piece("a", part, parts).bytes_of(whole) for part in range(parts)]
    assert sum(sizes) == whole
    assert max(sizes) - min(sizes) <= 1


def test_every_cut_off_file_is_an_error_that_says_so():
    text = PLAN.to_json()
    for length in range(len(text)):
        assert error_of(text[:length]).startswith("p.json: cut off or not JSON")


def test_a_file_of_another_format_is_refused():
    assert error_of('{"format":"tf_caramel profile 1"}') == (
        "p.json: format: 'tf_caramel profile 1' is not 'tf_caramel plan 1'"
    )
    assert error_of("[]") == "p.json: format: 'list' is not 'tf_caramel plan 1'"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"batches": None}, "p.json: bodies[0].batches: None, but it must be a list of lists of gradients"),
        ({"batches": ["a"]}, "p.json: bodies[0].batches: ['a']"),
        ({"batches": [[1]]}, "p.json: bodies[0].batches: [[1]]"),
        ({"batches": [["a"], []]}, "p.json: bodies[0].batches: [['a'], []]"),
        ({"window": -1}, "p.json: bodies[0].window: -1, but it must be a whole number, 0 or more"),
        ({"window": 1.5}, "p.json: bodies[0].window: 1.5"),
        ({"edges": [["x"]]}, "p.json: bodies[0].edges: [['x']], but it must be a list of pairs of ops"),
        ({"edges": "xy"}, "p.json: bodies[0].edges: 'xy'"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_field(fields: dict[str, Any], found: str):
    assert error_of(changed(**fields)).startswith(found)


def test_a_plan_needs_bodies():
    assert error_of('{"format":"tf_caramel plan 1"}').startswith("p.json: bodies: missing")


def test_a_plan_that_sends_every_gradient_once_and_whole_fits():
    check(PLAN, KINDS)


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        (((A, B), HALVES, (Piece("x"),)), "bodies[0].batches[2]: 'x' is not a gradient of this step"),
        (((A, B), HALVES, (A,)), "bodies[0].batches: 'a' must be sent once and whole, but the plan sends a, a"),
        (((A,), HALVES), "bodies[0].batches: 'b' must be sent once and whole, but the plan sends nothing"),
        (((A, B), HALVES[:1]), "bodies[0].batches: 'c' must be sent once and whole, but the plan sends c[0/2]"),
        (((A, B), HALVES[:1] * 2), "bodies[0].batches: 'c' must be sent once and whole"),
        (((A, B), (*HALVES, Piece("c"))), "bodies[0].batches: 'c' must be sent once and whole"),
        (((A, B), (Piece("c", 0, 2), Piece("c", 1, 3))), "bodies[0].batches: 'c' must be sent once and whole"),
        (((A, B), (*HALVES, Piece("c", 2, 2))), "bodies[0].batches: 'c' must be sent once and whole"),
    ],
)
def test_a_plan_that_does_not_send_every_gradient_once_and_whole_is_refused(batches: Any, found: str):
    with pytest.raises(InputError) as error:
        check(Plan((BodyPlan(batches), BodyPlan(()))), KINDS, "p.json")
    assert str(error.value).startswith(f"p.json: {found}")


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ({"a": "float32", "b": "float16", "c": "x"}, "batches[0]: 'b' cannot share a message with 'a'"),
        ({"a": None, "b": "float32", "c": "x"}, "batches[0]: 'a' has to travel alone and whole"),
        ({"a": "float32", "b": None, "c": "x"}, "batches[0]: 'b' has to travel alone and whole"),
        ({"a": "x", "b": "x", "c": None}, "batches[1]: 'c' has to travel alone and whole"),
    ],
)
def test_a_message_of_several_kinds_or_of_what_travels_alone_is_refused(kinds: dict[str, str | None], found: str):
    with pytest.raises(InputError) as error:
        check(PLAN, [kinds, {}], "p.json")
    assert str(error.value) == f"p.json: bodies[0].{found}"


def test_a_plan_for_another_number_of_bodies_is_refused():
    with pytest.raises(InputError, match=r"p.json: bodies: 2 of them, but the step has 1 with collectives"):
        check(PLAN, KINDS[:1], "p.json")


DEFERRING = Plan((BodyPlan(((A,), (Piece("b", 0, 2),), (Piece("b", 1, 2), Piece("c"))), deferred=1),))


def test_a_plan_with_deferral_survives_json_and_one_without_says_nothing_of_it():
    assert Plan.from_json(DEFERRING.to_json()) == DEFERRING
    without = Plan((replace(DEFERRING.bodies[0], deferred=0),))
    assert "deferred" not in without.to_json()
    assert Plan.from_json(without.to_json()) == without
    assert without.digest != DEFERRING.digest
    check(DEFERRING, KINDS[:1], obstacles=[{"b": "it is not"}])


@pytest.mark.parametrize("deferred", [-1, 4, 1.0, True, "1", None])
def test_a_number_of_deferred_batches_that_cannot_be_is_an_error(deferred: object):
    data = json.loads(DEFERRING.to_json())
    data["bodies"][0]["deferred"] = deferred
    with pytest.raises(InputError, match=r"p.json: bodies\[0\].deferred: .* it must be a whole number from 0 to 3"):
        Plan.from_json(json.dumps(data), "p.json")


@pytest.mark.parametrize(
    ("deferred", "obstacles_", "found"),
    [
        (2, {}, "of 'b' some chunks are deferred and some are not"),
        (1, {"a": "its norm is clipped"}, "'a' cannot be deferred: its norm is clipped"),
        (4, {}, "4, but there are 3 batches"),
    ],
)
def test_a_plan_that_defers_what_cannot_be_is_refused(deferred: int, obstacles_: dict[str, str], found: str):
    plan = Plan((replace(DEFERRING.bodies[0], deferred=deferred),))
    with pytest.raises(InputError) as error:
        check(plan, KINDS[:1], "p.json", [obstacles_])
    assert str(error.value) == f"p.json: bodies[0].deferred: {found}"


def test_a_digest_is_the_start_of_the_sha256_of_sorted_json():
    text = b'{"a": [1, "x", null], "b": 2.0}'
    assert digest({"b": 2.0, "a": (1, "x", None)}) == hashlib.sha256(text).hexdigest()[:10]


def test_equal_plans_have_equal_digests_whoever_made_them():
    assert Plan.from_json(PLAN.to_json()).digest == PLAN.digest == Plan(PLAN.bodies, "static").digest


@pytest.mark.parametrize(
    "body",
    [
        BodyPlan(((B, A), HALVES[:1], HALVES[1:]), 2, BODY.edges),
        BodyPlan((HALVES[:1], (A, B), HALVES[1:]), 2, BODY.edges),
        BodyPlan(BODY.batches, 1, BODY.edges),
        BodyPlan(BODY.batches, 2),
    ],
)
def test_another_order_window_or_edge_has_another_digest(body: BodyPlan):
    assert Plan((body, BodyPlan(()))).digest != PLAN.digest


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
