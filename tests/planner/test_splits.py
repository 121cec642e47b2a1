"""The search for what to defer: any judge, and the best set it can know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_caramel.planner.profile import Network
from tf_caramel.planner.splits import Member, Splits

SECOND_A_BYTE = Network(start_up_seconds=0.0, seconds_per_byte=1.0)
MEMBERS = [Member(f"g{k}", 1 + k % 3, 8.0 - k, float(k)) for k in range(8)]


@pytest.mark.parametrize("most", [5, 15])
def test_the_search_for_sets_judges_as_often_as_it_may_and_no_set_twice(most: int):
    judged: list[tuple[str, ...]] = []
    found = Splits(MEMBERS, SECOND_A_BYTE, lambda names: judged.append(names) or len(judged), most).best(2)
    assert len(judged) == len(set(judged)) == most
    assert found == [judged[0], judged[1]]


@given(st.sets(st.integers(0, 7), min_size=1))
def test_the_search_for_sets_ends_where_no_member_should_change_sides(wanted: set[int]):
    best = {f"g{k}" for k in wanted}
    found = Splits(MEMBERS, SECOND_A_BYTE, lambda names: len(best.symmetric_difference(names)), 400).best(1)
    assert found == [tuple(sorted(best))]


def test_of_sets_that_are_as_good_the_one_that_keeps_fewer_bytes_is_taken():
    assert Splits(MEMBERS, SECOND_A_BYTE, lambda names: 1.0, 400).best(1) == [("g6",)]
