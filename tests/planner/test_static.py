"""The static plan: which transfers share a batch, and in which order batches come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tf_caramel.planner.plan import Transfer
from tf_caramel.planner.static import static_plan


def batches(*transfers: Transfer, cap: int | None = 10) -> list[list[int]]:
    (body,) = static_plan([transfers], cap).batches
    return [list(members) for members in body]


def sized(*sizes: int | None, kind: str | None = "k") -> list[Transfer]:
    """Transfers of these bytes, ready one after another."""
    return [Transfer(size, ready, kind) for ready, size in enumerate(sizes)]


def of_kinds(kinds: str) -> list[Transfer]:
    """Transfers of one byte, ready one after another; each letter is a kind."""
    return [Transfer(1, ready, kind) for ready, kind in enumerate(kinds)]


def test_a_batch_is_filled_up_to_the_cap():
    assert batches(*sized(4, 6, 1, 9, 1)) == [[0, 1], [2, 3], [4]]


def test_batches_are_filled_in_order_of_readiness():
    assert batches(Transfer(4, 9, "k"), Transfer(4, 1, "k"), Transfer(4, 5, "k")) == [[1, 2], [0]]


def test_transfers_ready_together_keep_the_trace_s_order():
    assert batches(*(Transfer(5, 7, "k") for _ in range(4))) == [[0, 1], [2, 3]]


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
    assert static_plan([sized(4, 4), [], sized(8, 8)], 10).batches == (((0, 1),), (), ((0,), (1,)))


bodies = st.lists(
    st.lists(
        st.builds(
            Transfer,
            bytes_=st.none() | st.integers(0, 30),
            ready=st.integers(0, 9),
            kind=st.sampled_from([None, "a", ("b", 1.0)]),
        ),
        max_size=20,
    ),
    max_size=3,
)
caps = st.none() | st.integers(0, 40)


@given(bodies, caps)
def test_every_transfer_travels_exactly_once(planned: list[list[Transfer]], cap: int | None):
    found = [sorted(n for members in body for n in members) for body in static_plan(planned, cap).batches]
    assert found == [list(range(len(transfers))) for transfers in planned]


@given(bodies, caps)
def test_no_batch_of_several_exceeds_the_cap_or_mixes_kinds(planned: list[list[Transfer]], cap: int | None):
    for transfers, body in zip(planned, static_plan(planned, cap).batches, strict=True):
        for members in body:
            if len(members) > 1:
                assert cap is not None
                assert sum(transfers[n].bytes_ or 0 for n in members) <= cap
                assert len({transfers[n].kind for n in members}) == 1
                assert not any(transfers[n].bytes_ is None or transfers[n].kind is None for n in members)


@given(bodies, caps)
def test_batches_are_never_ordered_against_readiness(planned: list[list[Transfer]], cap: int | None):
    for transfers, body in zip(planned, static_plan(planned, cap).batches, strict=True):
        ready = [max(transfers[n].ready for n in members) for members in body]
        assert ready == sorted(ready)


@given(bodies, caps)
def test_equal_input_gives_an_equal_plan(planned: list[list[Transfer]], cap: int | None):
    copies = [[Transfer(t.bytes_, t.ready, t.kind) for t in transfers] for transfers in planned]
    assert static_plan(planned, cap).to_json() == static_plan(copies, cap).to_json()
