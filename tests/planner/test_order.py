"""Orders: TicTac's examples and definitions, the flow shop, readiness, and the sequence on the link."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.draw import ancestors, profiles
from tests.planner.profiles import chain, layered
from tf_caramel.planner import flowshop, order, tictac
from tf_caramel.planner.order import Item, Order, sequence, submission
from tf_caramel.planner.plan import Piece
from tf_caramel.planner.profile import InputError, Network, Op, Profile, Transfer
from tf_caramel.planner.structure import levels, once_a_graph, readiness
from tf_caramel.planner.tictac import NEVER, Node, tac, tic

FREE = Network(start_up_seconds=0.0, seconds_per_byte=0.0)
A_SECOND_A_BYTE = Network(start_up_seconds=0.0, seconds_per_byte=1.0)


def recv_chain(layers: int) -> list[Node]:
    """Recvs 0 .. layers-1, then a chain of ops, each of which needs the next recv."""
    ops = [Node(1.0, (k, layers + k - 1) if k else (0,)) for k in range(layers)]
    return [Node(1.0)] * layers + ops


def step(ops: Sequence[Op], transfers: Sequence[Transfer], network: Network = FREE) -> Profile:
    return Profile("step", tuple(ops), tuple(transfers), network)


def names(profile: Profile, made: Order) -> list[str]:
    return [item.piece.transfer for item in submission(profile, made)]


# TIC and TAC


def test_tic_does_not_separate_the_two_recvs_of_figure_1a():
    assert tic([Node(1.0), Node(1.0), Node(1.0, (0,)), Node(1.0, (1, 2))], [0, 1]) == [2, 2]


def test_tac_sends_the_recv_of_figure_1a_first_that_lets_compute_start():
    assert tac([Node(1.0), Node(1.0), Node(1.0, (0,)), Node(1.0, (1, 2))], [0, 1]) == [0, 1]
    assert tac([Node(1.0), Node(1.0), Node(1.0, (1,)), Node(1.0, (0, 2))], [0, 1]) == [1, 0]


def test_tic_reproduces_figure_4b():
    a, b, c, d = range(4)
    ops = [Node(1.0, (a, b)), Node(1.0, (4, c)), Node(1.0, (5, d))]
    assert tic([Node(1.0)] * 4 + ops, [a, b, c, d]) == [2, 2, 3, 4]


def test_tic_of_a_chain_is_its_order():
    assert tic(recv_chain(6), range(6)) == [2, 2, 3, 4, 5, 6]


def test_tac_of_a_chain_is_its_order_wherever_its_recvs_stand():
    assert tac(recv_chain(6), range(6)) == [0, 1, 2, 3, 4, 5]
    assert tac(recv_chain(6), [5, 3, 1, 0, 2, 4]) == [3, 2, 4, 1, 5, 0]


def test_a_transfer_that_is_done_no_longer_counts_for_tac():
    needed_first, late, urgent, with_late, with_urgent = range(5)
    nodes = [Node(m) for m in (4.0, 1.0, 1.0, 3.0, 1.0)]
    nodes += [Node(9.0, (needed_first,)), Node(0.0, (needed_first, urgent, with_urgent)), Node(0.0, (late, with_late))]
    # M+ of the urgent one falls from 6 to 2, below the late one's 4.
    assert tac(nodes, range(5))[:2] == [needed_first, urgent]


def test_a_recv_that_is_needed_alone_has_no_m_plus():
    assert tic([Node(1.0), Node(1.0), Node(1.0, (0,))], [0, 1]) == [NEVER, NEVER]


@st.composite
def recv_graphs(draw: st.DrawFn) -> tuple[list[Node], int]:
    count = draw(st.integers(1, 5))
    nodes = [Node(float(draw(st.integers(0, 4)))) for _ in range(count)]
    for k in range(count, count + draw(st.integers(0, 8))):
        inputs = draw(st.sets(st.integers(0, k - 1), min_size=1, max_size=3))
        nodes.append(Node(float(draw(st.integers(0, 4))), tuple(sorted(inputs))))
    return nodes, count


@given(recv_graphs())
def test_tac_takes_properties_as_the_paper_defines_them(graph: tuple[list[Node], int]):
    nodes, count = graph
    depends: list[set[int]] = []
    for k, node in enumerate(nodes):
        depends.append({k} if k < count else set().union(*(depends[i] for i in node.inputs)))
    left, expected = set(range(count)), []
    while left:
        p, m_plus = dict.fromkeys(left, 0.0), dict.fromkeys(left, math.inf)
        for node, needed in list(zip(nodes, depends, strict=True))[count:]:
            outstanding = needed & left
            if len(outstanding) == 1:
                p[min(outstanding)] += node.seconds
            for r in outstanding if len(outstanding) > 1 else ():
                m_plus[r] = min(m_plus[r], sum(nodes[i].seconds for i in outstanding))
        m = {r: nodes[r].seconds for r in left}
        best = min(left, key=lambda r: ((0, m[r]) if m[r] <= p[r] else (1, -p[r]), m_plus[r], r))
        expected.append(best)
        left.remove(best)
    assert tac(nodes, range(count)) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_tac_is_optimal_for_recvs_with_one_op_each(times: list[tuple[int, int]]):
    nodes = [Node(float(m)) for m, _ in times] + [Node(float(p), (k,)) for k, (_, p) in enumerate(times)]

    def makespan(recvs: Sequence[int]) -> float:
        link = compute = 0
        for r in recvs:
            link += times[r][0]
            compute = max(compute, link) + times[r][1]
        return compute

    assert makespan(tac(nodes, range(len(times)))) == min(map(makespan, permutations(range(len(times)))))


def test_the_recv_of_a_parameter_is_what_its_readers_wait_for():
    read, product, gradient = Op("read", 1.0), Op("product", 2.0, (0,)), Op("gradient", 4.0, (1,))
    ops = [read, product, gradient, Op("sum", 0.0, (2,)), Op("update", 8.0, (3,))]
    ops += [Op("v_sum", 0.0, (2,)), Op("v_update", 16.0, (5,))]
    profile = step(ops, [Transfer("w", 5, 3, readers=(1, 4)), Transfer("v", 6, 5, readers=(6,))], A_SECOND_A_BYTE)
    # It waits for nothing, not even for its own gradient. Updates do not count, so nobody reads v.
    assert tictac.recv_graph(profile) == ((0,), [Node(5.0), Node(1.0), Node(2.0, (1, 0)), Node(4.0, (2,))])


@pytest.mark.parametrize(("policy", "layers"), [(order.tic, (2, 1, 3, 0)), (order.tac, (1, 2, 3, 0))])
def test_first_layers_are_urgent_and_what_nobody_reads_is_not(policy: Callable[[Profile], Order], layers: list[int]):
    profile = chain(4)
    *others, first = profile.transfers
    profile = replace(profile, transfers=(*others, replace(first, readers=())))
    waiting = [replace(item, ready=0.0) for item in submission(profile, Order(policy(profile).priority))]
    # TIC leaves the first two of a chain to readiness.
    found = [item.piece.transfer for item in sequence(waiting, FREE)]
    assert found == [f"layer{k}/kernel" for k in layers]


# Readiness and levels


def test_gradients_are_ready_when_the_ops_before_them_have_run_one_by_one():
    ops = [Op("a", 1.0), Op("b", 2.0), Op("a_sum", 0.0, (0,)), Op("other", 4.0), Op("b_sum", 0.0, (1,))]
    assert readiness(step(ops, [Transfer("a", 1, 2), Transfer("b", 1, 4)])) == [1.0, 3.0]


def test_updates_delay_no_gradient():
    ops = [Op("a", 1.0), Op("a_sum", 0.0, (0,)), Op("update", 8.0, (1,)), Op("b", 2.0), Op("b_sum", 0.0, (3,))]
    assert readiness(step(ops, [Transfer("a", 1, 1), Transfer("b", 1, 4)])) == [1.0, 3.0]


def test_what_waits_for_a_transfer_is_ready_after_it():
    ops = [Op("a", 1.0), Op("a_sum", 0.0, (0,)), Op("b", 2.0, (1,)), Op("c", 4.0), Op("b_sum", 0.0, (2,))]
    profile = step(ops, [Transfer("a", 10, 1), Transfer("b", 1, 4)], A_SECOND_A_BYTE)
    assert levels(profile) == (0, 0, 1, 0, 1)
    assert readiness(profile) == [1.0, 13.0]  # c runs meanwhile


def test_edges_delay_readiness():
    ops = [Op("a", 1.0), Op("b", 2.0), Op("a_sum", 0.0, (0,)), Op("b_sum", 0.0, (1,))]
    profile = step(ops, [Transfer("a", 1, 2), Transfer("b", 1, 3)])
    assert readiness(profile, [("b", "a")]) == [3.0, 2.0]


@pytest.mark.parametrize(
    ("edges", "words"),
    [([("a", "x")], "'x' is not an op"), ([("b", "a"), ("a", "b")], "in a circle: a, b")],
)
def test_edges_that_cannot_be_kept_are_errors(edges: list[tuple[str, str]], words: str):
    ops = [Op("a", 1.0), Op("b", 2.0), Op("a_sum", 0.0, (0,)), Op("b_sum", 0.0, (1,))]
    with pytest.raises(InputError, match=words):
        readiness(step(ops, [Transfer("a", 1, 2), Transfer("b", 1, 3)]), edges)


def test_what_a_graph_implies_is_computed_once_whatever_the_network():
    seen = []
    function = once_a_graph(lambda profile: seen.append(profile) or len(seen))
    profile = chain(2)
    assert function(profile) == function(replace(profile, network=FREE)) == 1
    assert function(chain(2)) == function(replace(profile, speeds=(1.0, 2.0))) - 1 == 2
    for _ in range(4):
        function(chain(2))
    assert function(profile) == len(seen) == 8  # forgotten meanwhile


# The flow shop


@st.composite
def steps(draw: st.DrawFn) -> Profile:
    """Any small step, with gates anywhere."""
    profile = draw(profiles())
    ops = tuple(replace(op, gate=draw(st.booleans())) for op in profile.ops)
    return replace(profile, ops=ops)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_johnsons_order_is_optimal_for_gradients_that_share_nothing(times: list[tuple[int, int]]):
    count = len(times)
    ops = [Op(f"g{k}", float(p)) for k, (p, _) in enumerate(times)]
    ops += [Op(f"s{k}", 0.0, (k,)) for k in range(count)]
    transfers = [Transfer(f"g{k}", m, count + k) for k, (_, m) in enumerate(times)]

    def makespan(picks: Sequence[int]) -> float:
        compute = link = 0
        for k in picks:
            compute += times[k][0]
            link = max(link, compute) + times[k][1]
        return link

    picks, _ = flowshop.johnson(step(ops, transfers, A_SECOND_A_BYTE), keep_busy=False)
    assert makespan(picks) == min(map(makespan, permutations(range(count))))


def test_what_all_gradients_need_does_not_count():
    ops = [Op("all", 9.0), Op("a", 2.0, (0,)), Op("b", 1.0, (0,)), Op("a_sum", 0.0, (1,)), Op("b_sum", 0.0, (2,))]
    profile = step(ops, [Transfer("a", 3, 3), Transfer("b", 2, 4)], A_SECOND_A_BYTE)
    # By 11 > 3 and 10 > 2 the larger message would come first; by 2 <= 3 and 1 <= 2 it is the shorter op.
    assert flowshop.johnson(profile, keep_busy=False) == ([1, 0], False)


def test_the_link_is_kept_busy_with_what_is_ready_earliest():
    ops = [Op("a", 5.0), Op("b", 6.0), Op("a_sum", 0.0, (0,)), Op("b_sum", 0.0, (1,))]
    profile = step(ops, [Transfer("a", 1, 2), Transfer("b", 2, 3)], A_SECOND_A_BYTE)
    assert flowshop.johnson(profile, keep_busy=False) == ([1, 0], True)
    assert flowshop.johnson(profile, keep_busy=True) == ([0, 1], True)


@given(steps(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_edges_hold_only_ops_that_may_wait_and_close_no_circle(profile: Profile, random):
    picks = [k for k, t in enumerate(profile.transfers) if not levels(profile)[t.op]]
    random.shuffle(picks)
    edges = flowshop.edges(profile, picks)
    gates = {op.name for op in profile.ops if op.gate}
    assert all(target in gates for _, target in edges)
    readiness(profile, edges)


@given(profiles(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_if_every_op_may_wait_gradients_become_ready_in_the_order_asked_for(profile: Profile, random):
    collectives = {t.op for t in profile.transfers}
    ops = [
        op if k in collectives else replace(op, seconds=op.seconds or 1.0, gate=True)
        for k, op in enumerate(profile.ops)
    ]
    profile = replace(profile, ops=tuple(ops))
    picks = [k for k, t in enumerate(profile.transfers) if not levels(profile)[t.op]]
    random.shuffle(picks)
    ready = readiness(profile, flowshop.edges(profile, picks))
    inputs, computed = [set(op.inputs) for op in ops], set()
    for number, pick in enumerate(picks):
        needed = ancestors(inputs, profile.transfers[pick].op) - collectives
        if needed - computed:  # else it is ready with an earlier one
            assert all(ready[pick] >= ready[earlier] for earlier in picks[:number])
        computed |= needed


def test_an_op_is_held_by_the_gradient_just_before_its_own_alone():
    ops = [Op(name, 1.0, gate=True) for name in "cba"] + [Op(f"{name}_sum", 0.0, (k,)) for k, name in enumerate("cba")]
    profile = step(ops, [Transfer(name, 1, 3 + k) for k, name in enumerate("cba")])
    assert flowshop.edges(profile, [2, 1, 0]) == (("b", "c"), ("a", "b"))


def test_what_no_gradient_needs_runs_after_the_last_gradient():
    ops = [Op("metric", 5.0, gate=True), Op("a", 1.0), Op("a_sum", 0.0, (1,))]
    made = order.caramel(step(ops, [Transfer("a", 1, 2)]))
    assert made.edges == (("a", "metric"),)


def test_an_edge_that_would_hold_next_to_nothing_is_left_out():
    ops = [Op("metric", 5e-6, gate=True), Op("a", 1.0), Op("a_sum", 0.0, (1,))]
    assert order.caramel(step(ops, [Transfer("a", 1, 2)])).edges == ()


def test_a_step_as_it_should_be_gets_no_edges():
    assert order.caramel(chain(5)).edges == ()


# The sequence


def item(name: str, ready: float, bytes_: int = 1, priority: int = 0, level: int = 0) -> Item:
    return Item(Piece(name), bytes_, ready, "k", priority, level)


def sent(*items: Item) -> str:
    return "".join(i.piece.transfer for i in sequence(items, A_SECOND_A_BYTE))


def test_equally_urgent_gradients_go_by_readiness_then_as_given():
    assert sent(item("c", 2.0), item("a", 1.0), item("d", 2.0), item("b", 1.5)) == "abcd"


def test_a_free_link_takes_the_most_urgent_of_what_is_ready():
    assert sent(item("a", 0.0, 5, 9), item("b", 1.0, 1, 3), item("c", 2.0, 1, 1), item("d", 3.0, 1, 2)) == "acdb"


def test_the_link_never_waits_for_a_more_urgent_gradient():
    assert sent(item("late", 1.0, priority=0), item("early", 0.9, 9, priority=1)) == "earlylate"


def test_what_waits_for_other_transfers_comes_after_their_whole_level():
    assert sent(item("b", 0.0, level=1), item("c", 3.0, level=1), item("a", 5.0, level=0)) == "abc"


def test_fifo_is_the_order_of_readiness():
    profile = layered([(0.01, 100, 0)] * 3, small_bytes=10)
    ready = dict(zip((t.name for t in profile.transfers), readiness(profile), strict=True))
    found = names(profile, order.fifo(profile))
    assert found == sorted(found, key=lambda name: ready[name])
    assert found[0] == "layer2/kernel"


def test_gradients_of_two_levels_or_kinds_never_share_a_message_and_those_of_none_travel_alone():
    ops = [Op("a", 1.0), Op("a_sum", 0.0, (0,)), Op("b", 0.0, (1,))]
    ops += [Op("c", 0.0, (0,)), Op("d", 0.0, (0,)), Op("e", 0.0, (0,))]
    kinds = {"a": (1, "x"), "b": (2, "x"), "c": (3, "x"), "d": (4, "y"), "e": (5, None)}
    profile = step(ops, [Transfer(name, 1, op, kind) for name, (op, kind) in kinds.items()])
    group = {i.piece.transfer: i.group for i in submission(profile, order.fifo(profile))}
    assert group["a"] == group["c"]
    assert len({group["a"], group["b"], group["d"]}) == 3
    assert group["e"] is None
