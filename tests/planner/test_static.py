"""The static plan: which transfers share a batch, and in which order batches come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tf_caramel.planner.static import Traced, static_plan


def planned(bodies: Sequence[Sequence[Traced]], cap: int | None) -> list[list[list[int]]]:
    """Of each body, the numbers of the transfers in each batch; a transfer is called by its number."""
    plan = static_plan([[replace(t, name=str(n)) for n, t in enumerate(transfers)] for transfers in bodies], cap)
    assert all(piece.parts == 1 for body in plan.bodies for batch in body.batches for piece in batch)
    return [[[int(piece.transfer) for piece in batch] for batch in body.batches] for body in plan.bodies]


def batches(*transfers: Traced, cap: int | None = 10) -> list[list[int]]:
    return planned([transfers], cap)[0]


def sized(*sizes: int | None, kind: str | None = "k") -> list[Traced]:
    """Transfers of these bytes, ready one after another."""
    return [Traced("", size, ready, kind) for ready, size in enumerate(sizes)]


def of_kinds(kinds: str) -> list[Traced]:
    """Transfers of one byte, ready one after another; each letter is a kind."""
    return [Traced("", 1, ready, kind) for ready, kind in enumerate(kinds)]


def test_a_batch_is_filled_up_to_the_cap():
    assert batches(*sized(4, 6, 1, 9, 1)) == [[0, 1], [2, 3], [4]]


def test_batches_are_filled_in_order_of_readiness():
    assert batches(Traced("", 4, 9, "k"), Traced("", 4, 1, "k"), Traced("", 4, 5, "k")) == [[1, 2], [0]]


def test_transfers_ready_together_keep_the_trace_s_order():
    assert batches(*(Traced("", 5, 7, "k") for _ in range(4))) == [[0, 1], [2, 3]]


def test_a_transfer_larger_than_the_cap_travels_alone():
    assert batches(*sized(4, 11, 4, 4)) == [[0], [1], [2, 3]]


def test_a_transfer_of_unknown_size_travels_alone():
    assert batches(*sized(4, None, 4)) == [[1], [0, 2]]


def test_a_transfer_without_a_kind_travels_alone():
    assert batches(*sized(1, 1, kind=None)) == [[0], [1]]


def test_kinds_never_share_a_batch():
    assert batches(*of_kinds("abab")) == [[0, 2], [1, 3]]


def test_without_a_cap_every_transfer_travels_alone():
    assert batches(*sized(1, 1, 1), cap=None) == [[0], [1], [2]]


def test_batches_come_in_the_order_in_which_their_last_members_are_ready():
    # The batch of "a" is begun first and complete last.
    assert batches(*of_kinds("abba")) == [[1, 2], [0, 3]]


def test_bodies_are_planned_one_by_one():
    assert planned([sized(4, 4), [], sized(8, 8)], 10) == [[[0, 1]], [], [[0], [1]]]


def test_the_window_is_passed_on():
    assert [body.window for body in static_plan([sized(1), sized(1)], 10, window=2).bodies] == [2, 2]


some_bodies = st.lists(
    st.lists(
        st.builds(
            Traced,
            name=st.just(""),
            bytes_=st.none() | st.integers(0, 30),
            ready=st.integers(0, 9),
            kind=st.sampled_from([None, "a", "b"]),
        ),
        max_size=20,
    ),
    max_size=3,
)
caps = st.none() | st.integers(0, 40)


@given(some_bodies, caps)
def test_every_transfer_travels_exactly_once(bodies: list[list[Traced]], cap: int | None):
    found = [sorted(n for members in body for n in members) for body in planned(bodies, cap)]
    assert found == [list(range(len(transfers))) for transfers in bodies]


@given(some_bodies, caps)
def test_no_batch_of_several_exceeds_the_cap_or_mixes_kinds(bodies: list[list[Traced]], cap: int | None):
    for transfers, body in zip(bodies, planned(bodies, cap), strict=True):
        for members in body:
            if len(members) > 1:
                assert cap is not None
                assert sum(transfers[n].bytes_ or 0 for n in members) <= cap
                assert len({transfers[n].kind for n in members}) == 1
                assert not any(transfers[n].bytes_ is None or transfers[n].kind is None for n in members)


@given(some_bodies, caps)
def test_batches_are_never_ordered_against_readiness(bodies: list[list[Traced]], cap: int | None):
    for transfers, body in zip(bodies, planned(bodies, cap), strict=True):
        ready = [max(transfers[n].ready for n in members) for members in body]
        assert ready == sorted(ready)


@given(some_bodies, caps)
def test_equal_input_gives_an_equal_plan(bodies: list[list[Traced]], cap: int | None):
    copies = [[replace(t) for t in transfers] for transfers in bodies]
    assert planned(bodies, cap) == planned(copies, cap)
