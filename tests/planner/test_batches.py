"""Batchings: what shares a message, and how a search moves from one to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.draw import EIGHTHS
from tf_caramel.planner.batches import Batches, batcher, fixed, mgwfbp, none, size
from tf_caramel.planner.moves import chunked, neighbours
from tf_caramel.planner.order import Item
from tf_caramel.planner.plan import Piece
from tf_caramel.planner.profile import InputError, Network

NETWORK = Network(start_up_seconds=1.0, seconds_per_byte=1.0)


def item(name: str, bytes_: int = 1, ready: float = 0.0, group: str | None = "k", level: int = 0) -> Item:
    return Item(Piece(name), bytes_, ready, group, level=level)


def shown(batches: Batches) -> str:
    """Gradients called by one letter; a space between messages."""
    return " ".join("".join(map(str, (i.piece for i in batch))) for batch in batches)


def of_kinds(names: str, kinds: str) -> list[Item]:
    return [item(n, group=None if kind == "-" else kind) for n, kind in zip(names, kinds, strict=True)]


def last_end(batches: Sequence[Sequence[Item]], network: Network) -> float:
    end = 0.0
    for batch in batches:
        end = max(end, *(i.ready for i in batch)) + network.seconds(sum(i.bytes_ for i in batch))
    return end


def merges(items: Sequence[Item]) -> Iterator[list[list[Item]]]:
    """Every batching of neighbours that their groups allow."""
    for cuts in range(2 ** (len(items) - 1)):
        batches = [[items[0]]]
        for k, following in enumerate(items[1:]):
            if cuts >> k & 1:
                batches.append([])
            batches[-1].append(following)
        if all(len(b) == 1 or (len({i.group for i in b}) == 1 and b[0].group is not None) for b in batches):
            yield batches


items_ready = st.lists(st.tuples(st.integers(0, 8), EIGHTHS, st.sampled_from("aaab-")), min_size=1, max_size=9).map(
    lambda rows: [item(str(k), b, r, None if g == "-" else g) for k, (b, r, g) in enumerate(rows)]
)


@given(items_ready, EIGHTHS, EIGHTHS)
@settings(deadline=None)
def test_mgwfbp_ends_first_and_of_those_that_do_it_has_the_fewest_messages(items: list[Item], a: float, b: float):
    network = Network(a, b)
    batches = mgwfbp(items, network)
    assert [i for batch in batches for i in batch] == items
    assert (last_end(batches, network), len(batches)) == min((last_end(m, network), len(m)) for m in merges(items))


@pytest.mark.parametrize("n", [10, 11, 12])
def test_mgwfbp_is_exact_for_longer_chains_too(n: int):
    items = [item(str(k), bytes_=1 + k * 7 % 5, ready=1.5 * k) for k in range(n)]
    for a, b in ((0.25, 0.25), (2.0, 0.5), (1.0, 2.0)):
        network = Network(a, b)
        batches = mgwfbp(items, network)
        assert (last_end(batches, network), len(batches)) == min((last_end(m, network), len(m)) for m in merges(items))


def test_mgwfbp_merges_all_but_a_small_tail_if_compute_is_slower():
    items = [item(name, ready=10.0 * k) for k, name in enumerate("abcdef")]
    assert shown(mgwfbp(items, NETWORK)) == "abcde f"


def test_mgwfbp_starts_early_and_grows_if_the_network_is_slower():
    items = [item(name, ready=0.5 * k) for k, name in enumerate("abcdefghijkl")]
    assert shown(mgwfbp(items, NETWORK)) == "a bcde fghijkl"


def test_of_a_thousand_gradients_that_need_many_messages_mgwfbp_still_ends_first():
    # The link is as fast as compute and starting costs nothing: whatever waits for a later gradient is late.
    items = [item(str(k), ready=float(k + 1)) for k in range(1000)]
    batches = mgwfbp(items, Network(0.0, 1.0))
    assert last_end(batches, Network(0.0, 1.0)) == 1001.0


def test_none_sends_each_alone():
    assert shown(none(of_kinds("abc", "xx-"), NETWORK)) == "a b c"


def test_fixed_fills_messages_up_to_the_cap():
    items = [item("a", 4), item("b", 4), item("c", 3), item("d", 20), item("e", 8)]
    assert shown(fixed(8)(items, NETWORK)) == "ab c d e"


def test_fixed_fills_a_message_for_each_group_and_sends_it_in_the_turn_of_its_last_member():
    assert shown(fixed(2)(of_kinds("abcdefg", "xyx-yyx"), NETWORK)) == "ac d be f g"


@pytest.mark.parametrize("batches", [none, fixed(8), mgwfbp])
def test_of_no_gradients_there_are_no_batches(batches):
    assert batches([], NETWORK) == ()


@pytest.mark.parametrize(
    ("text", "bytes_"), [("4096", 4096), ("512KB", 2**19), ("8MB", 2**23), ("1GB", 2**30), ("0.5mb", 2**19)]
)
def test_sizes_are_powers_of_1024(text: str, bytes_: int):
    assert size(text) == bytes_


@pytest.mark.parametrize("text", ["", "MB", "8TB", "-1", "0", "8 MB per batch", "0.1"])
def test_what_is_no_size_is_an_error(text: str):
    with pytest.raises(InputError, match="is not a number of bytes: 4096"):
        size(text)


def test_a_batching_is_found_by_its_text():
    items = [item("a", 3), item("b", 3), item("c", 3)]
    assert shown(batcher("none")(items, NETWORK)) == "a b c"
    assert shown(batcher("fixed:6B")(items, NETWORK)) == "ab c"
    assert shown(batcher("mgwfbp")(items, NETWORK)) == "abc"


# Moves of the search


def around(items: Sequence[Item], *lengths: int) -> list[str]:
    """Neighbours of the batching into so many items each."""
    batches, start = [], 0
    for length in lengths:
        batches.append(tuple(items[start : start + length]))
        start += length
    return [shown(n) for n in neighbours(tuple(batches))]


def test_neighbours_split_merge_move_and_exchange():
    found = around([item(name) for name in "abcdef"], 2, 4)
    assert set(found) == {"ab cde f", "ab cd ef", "abcdef", "a bcdef", "abcd ef", "abc def", "a b cdef", "cdef ab"}


def test_a_batch_is_split_where_half_its_bytes_are():
    assert "abc d" in around([item("a"), item("b"), item("c"), item("d", 4)], 4)


def test_neighbours_of_two_groups_merge_around_each_other():
    found = around(of_kinds("abc", "xyx"), 1, 1, 1)
    assert set(found) == {"b ac", "b a c", "a c b"}


def test_batches_of_two_levels_do_not_change_places():
    assert around([item("a", level=0, group="x"), item("b", level=1, group="y")], 1, 1) == []


def test_what_travels_alone_stays_alone():
    assert "ab" not in around(of_kinds("ab", "--"), 1, 1)


def test_the_largest_gradients_are_cut_into_about_k_parts_and_the_rest_stays_together():
    # k* = sqrt(2 b S / a) = sqrt(2 * 50) = 10
    network = Network(start_up_seconds=1.0, seconds_per_byte=1.0)
    batches = ((item("a"), item("b", 50), item("c")), (item("d", 3),))
    cut = [shown(c).split() for c in chunked(batches, network)]
    # With the one or the three largest; d of 3 bytes is cut into 2 parts at k* and into 3, all that it has, at 2 k*.
    assert [sum(piece.startswith("b[") for piece in c) for c in cut] == [10, 5, 16, 10, 5, 16]
    assert [sum(piece.startswith("d[") for piece in c) for c in cut] == [0, 0, 0, 2, 0, 3]
    assert cut[0] == [*(f"b[{p}/10]" for p in range(10)), "ac", "d"]


def test_parts_hold_all_bytes():
    first = next(chunked(((item("a", 101),),), NETWORK))
    assert sum(batch[0].bytes_ for batch in first) == 101


def test_an_urgent_gradient_passes_between_parts():
    large, urgent = item("a", 50), item("b", ready=7.0)
    batches = ((replace(large, priority=1),), (urgent,))
    order = shown(next(chunked(batches, NETWORK))).split()
    assert order.index("b") == 2  # a part takes 6 seconds
    batches = ((replace(large, priority=1),), (replace(urgent, priority=2),))
    assert shown(next(chunked(batches, NETWORK))).endswith("] b")


def test_what_has_no_group_is_never_cut():
    assert list(chunked(((item("a", 50, group=None),),), NETWORK)) == []
