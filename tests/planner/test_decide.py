"""From a profile to a plan: known best answers on small steps, and what holds on any step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.draw import profiles
from tests.planner.profiles import GIGABIT, chain, layered, resnet_like
from tf_caramel.planner import decide as decide_module
from tf_caramel.planner import search
from tf_caramel.planner.decide import decide, parse
from tf_caramel.planner.order import POLICIES
from tf_caramel.planner.plan import BodyPlan, Plan, check
from tf_caramel.planner.profile import InputError, Network, Profile
from tf_caramel.planner.simulate import simulate

MS, MB = 1e-3, 2**20
PLAIN = ("none", *(f"fixed:{n}MB" for n in (1, 2, 4, 8, 16, 32, 64, 128)), "mgwfbp")
BATCHES = ["none", "fixed:1MB", "fixed:3B", "mgwfbp", "mgwfbp,window=2", "adaptive", "adaptive,window=2"]


def step(profile: Profile, plan: BodyPlan) -> float:
    return simulate(profile, plan, detail=False).step_seconds


def sizes(plan: BodyPlan) -> list[int]:
    return [len(batch) for batch in plan.batches]


@st.composite
def steps(draw: st.DrawFn) -> Profile:
    """Any small step, with gates and readers anywhere; transfers may wait for transfers."""
    profile = draw(profiles(speeds=(1.0, 1.5)))
    gates = draw(st.lists(st.booleans(), min_size=len(profile.ops), max_size=len(profile.ops)))
    ops = tuple(replace(op, gate=gate) for op, gate in zip(profile.ops, gates, strict=True))
    collectives = {t.op for t in profile.transfers}
    others = [k for k in range(len(ops)) if k not in collectives]
    reading = st.sets(st.sampled_from(others), max_size=3) if others else st.just(set())
    transfers = tuple(replace(t, readers=tuple(sorted(draw(reading)))) for t in profile.transfers)
    return replace(profile, ops=ops, transfers=transfers)


@given(steps(), st.sampled_from(sorted(POLICIES)), st.sampled_from(BATCHES))
@settings(max_examples=150, deadline=None)
def test_every_plan_can_be_carried_out(profile: Profile, order: str, batches: str):
    plan = decide(profile, order, batches)
    check(Plan((plan,)), [{t.name: t.kind for t in profile.transfers}])
    assert step(profile, plan) >= 0


@given(steps(), st.sampled_from(["fifo", "tac", "caramel"]))
@settings(max_examples=60, deadline=None)
def test_adaptive_is_never_slower_than_another_batching_of_its_order(profile: Profile, order: str):
    ours = step(profile, decide(profile, order, "adaptive"))
    for other in {order, "fifo"} if order == "caramel" else {order}:
        for batches in PLAIN:
            for window in (1, 2):
                plan = decide(profile, other, f"{batches},window={window}")
                assert ours <= step(profile, plan) + 1e-8


def best_of_all(profile: Profile) -> float:
    """Every merge of neighbours in the order of readiness, with window 1 and 2."""
    pieces = [piece for batch in decide(profile, "fifo", "none").batches for piece in batch]
    found = []
    for cuts in range(2 ** (len(pieces) - 1)):
        batches = [[pieces[0]]]
        for k, piece in enumerate(pieces[1:]):
            if cuts >> k & 1:
                batches.append([])
            batches[-1].append(piece)
        found += [step(profile, BodyPlan(tuple(map(tuple, batches)), window)) for window in (1, 2)]
    return min(found)


def made(ops: str, sizes: dict[str, int], network: Network, gated: str = "") -> Profile:
    """ops: "name=milliseconds(inputs)", in the order in which they were seen; the gradient of x is the op x, its update
    x_new.  sizes: milliseconds of each transfer, so that a byte takes one."""
    given, clock = [], 0.0
    for text in ops.split():
        name, _, rest = text.partition("=")
        seconds, _, inputs = rest.rstrip(")").partition("(")
        given.append((name, float(seconds) * MS, inputs.split(",") if inputs else [], clock, name in gated.split()))
        clock += float(seconds) * MS
    given += [(f"{op[0]}_sum", 0.0, [op[0]], op[3], False) for op in given if op[0] in sizes]
    transfers = [(g, size, f"{g}_sum", "float32", []) for g, size in sizes.items()]
    return Profile.make("made", given, transfers, network)


ONE_A_BYTE = Network(start_up_seconds=0.0, seconds_per_byte=1 * MS)
FAST = Network(start_up_seconds=2 * MS, seconds_per_byte=1e-9)
SLOW = Network(start_up_seconds=2 * MS, seconds_per_byte=4e-8, queued_seconds=1 * MS)
LATE = Network(start_up_seconds=30 * MS, seconds_per_byte=1e-9)
BUSY = replace(SLOW, cpu_seconds_per_message=1 * MS, cpu_seconds_per_byte=2e-8)


@pytest.mark.parametrize("network", [FAST, SLOW, LATE, BUSY])
@pytest.mark.parametrize("layers", [[1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 4, 8, 1, 2, 4, 8], [1, 1, 1, 1, 4, 4, 9, 0.1]])
def test_no_merge_of_neighbours_is_faster_than_adaptive(layers: list[float], network: Network):
    profile = layered([(10 * MS, int(size * MB), 0) for size in layers], network)
    assert step(profile, decide(profile)) <= best_of_all(profile) + 1e-6


def test_if_compute_is_slower_all_but_the_last_gradient_travel_together():
    profile = made(
        "a=10 b=10(a) c=10(b) d=10(c)", dict.fromkeys("abcd", 1), replace(ONE_A_BYTE, start_up_seconds=2 * MS)
    )
    assert sizes(decide(profile)) == [3, 1]


def test_if_the_network_is_slower_the_first_gradient_starts_at_once_and_the_rest_follow_in_few_messages():
    plan = decide(layered([(1 * MS, MB, 0)] * 20, SLOW))
    assert sizes(plan)[0] == 1
    assert len(plan.batches) <= 5


def test_a_huge_first_gradient_waits_for_no_other():
    profile = layered([(10 * MS, MB, 0)] * 5 + [(2 * MS, 100 * MB, 0)], FAST)
    plan = decide(profile)
    assert {piece.transfer for piece in plan.batches[0]} == {"layer5/kernel"}


def test_many_tiny_gradients_travel_in_few_messages():
    profile = layered([(0.1 * MS, 100, 0)] * 200, LATE)
    plan = decide(profile)
    assert len(plan.batches) <= 2
    assert step(profile, plan) < profile.compute_seconds + 2 * LATE.start_up_seconds


LATE_WEIGHTS = "f=10 d3=10(f) d2=10(d3) w3=10(f) w2=10(d3) w1=10(d2)"


def test_weight_gradients_that_ran_late_are_pulled_forward():
    profile = made(LATE_WEIGHTS, {"w3": 20, "w2": 20, "w1": 20}, ONE_A_BYTE, gated="d3 d2")
    plan = decide(profile)
    assert plan.edges == (("w3", "d3"), ("w2", "d2"))
    assert step(profile, decide(profile, "fifo")) == pytest.approx(100 * MS)
    assert step(profile, plan) == pytest.approx(80 * MS)


def test_where_no_op_may_be_made_to_wait_there_are_no_edges():
    profile = made(LATE_WEIGHTS, {"w3": 20, "w2": 20, "w1": 20}, ONE_A_BYTE)
    assert decide(profile, "caramel", "none").edges == ()


def test_a_compute_order_that_does_not_pay_is_not_used():
    late = replace(ONE_A_BYTE, start_up_seconds=15 * MS, seconds_per_byte=0.0)  # one message for all is as good
    profile = made(LATE_WEIGHTS, {"w3": 20, "w2": 20, "w1": 20}, late, gated="d3 d2")
    assert decide(profile, "caramel", "none").edges
    assert decide(profile).edges == ()


def test_of_two_branches_the_one_with_the_larger_gradient_is_computed_first():
    profile = made("a=10 b=12", {"a": 1, "b": 8}, ONE_A_BYTE, gated="a b")
    plan = decide(profile)
    assert plan.edges == (("b", "a"),)
    assert step(profile, decide(profile, "fifo")) == pytest.approx(30 * MS)
    assert step(profile, plan) == pytest.approx(23 * MS)


def test_chunks_of_a_large_gradient_let_an_urgent_one_pass():
    ops = [("big", 10 * MS, [], 0.0, False), ("small", 10 * MS, [], 0.01, False), ("all", 0.0, ["big"], 0.02, False)]
    ops += [("some", 0.0, ["small"], 0.03, False), ("new", 60 * MS, ["some"], 0.04, False)]
    transfers = [("big", 100, "all", "float32", []), ("small", 1, "some", "float32", [])]
    profile = Profile.make("chunks", ops, transfers, replace(ONE_A_BYTE, start_up_seconds=1 * MS))
    plan = decide(profile)
    first, last = str(plan.batches[0][0]), str(plan.batches[-1][0])
    assert first.startswith("big[0/")
    assert last.startswith("big[")
    assert step(profile, plan) < 120 * MS  # 132 if the small one goes first, 172 if it goes last


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_the_plan_does_not_depend_on_the_order_of_the_file(random):
    profile = layered([(10 * MS, MB, 1), (5 * MS, 2 * MB, 0), (10 * MS, MB, 1)], SLOW, small_bytes=100)
    data = json.loads(profile.to_json())
    random.shuffle(data["ops"])
    random.shuffle(data["transfers"])
    for op in data["ops"]:
        random.shuffle(op["inputs"])
    assert decide(Profile.from_json(json.dumps(data))) == decide(profile)


def test_a_network_of_an_earlier_call_is_not_used():
    profile = layered([(10 * MS, MB, 0)] * 6, LATE)
    late = decide(profile, effort="quick")
    again = layered([(10 * MS, MB, 0)] * 6, SLOW)
    assert decide(replace(profile, network=SLOW), effort="quick") == decide(again, effort="quick") != late


def test_the_last_word_has_the_profile_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def blind(profile: Profile, edges: object) -> Profile:
        return replace(profile, transfers=tuple(replace(t, bytes_=0) for t in profile.transfers))

    monkeypatch.setattr(decide_module, "compress", blind)
    profile = layered([(10 * MS, MB, 0)] * 12, replace(SLOW, start_up_seconds=0.1 * MS))
    plain = min(step(profile, decide(profile, "fifo", f"{batches},window=2")) for batches in PLAIN)
    assert step(profile, decide(profile)) <= plain + 1e-8


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an item with each simulation."""
    count: list[int] = []
    monkeypatch.setattr(search, "simulate", lambda *args, **options: count.append(1) or simulate(*args, **options))
    return count


def test_the_number_of_simulations_is_fixed_and_small_if_quick(simulations: list[int]):
    profile = resnet_like(4)
    decide(profile, effort="quick")
    quick = len(simulations)
    assert quick <= 14
    decide(profile, effort="quick")
    assert len(simulations) == 2 * quick


def test_the_search_ends_when_its_simulations_are_spent(simulations: list[int], monkeypatch: pytest.MonkeyPatch):
    found = {}
    for count in (0, 10):
        monkeypatch.setattr(search.Effort, "simulations", lambda self, step, count=count: count)
        simulations.clear()
        decide(resnet_like(4))
        found[count] = len(simulations)
    assert found[0] < found[10] <= found[0] + 2 * (10 + 1)  # from two starts; the last word tries both results


@pytest.mark.parametrize("network", [replace(GIGABIT, start_up_seconds=20 * MS, queued_seconds=None), GIGABIT])
@pytest.mark.parametrize("made_up", [resnet_like, partial(chain, 20)])
def test_a_quick_plan_is_hardly_slower(made_up: Callable[..., Profile], network: Network):
    profile = made_up(network=network)
    quick = step(profile, decide(profile, effort="quick"))
    assert quick < 1.02 * step(profile, decide(profile))
    assert quick < 1.005 * step(profile, decide(profile, "fifo", "mgwfbp"))


def test_collectives_that_wait_for_others_do_not_stop_the_search():
    # Horovod would send d, b, c; d and c cannot share a message behind b, which waits for d.
    profile = made("d=1 b=1(d_sum) x=25 c=25(x)", dict.fromkeys("dbc", 1), ONE_A_BYTE)
    assert step(profile, decide(profile)) == pytest.approx(54 * MS)


def test_window_is_one_unless_the_text_says_otherwise():
    profile = layered([(10 * MS, MB, 0)] * 3, SLOW)
    assert decide(profile, "fifo", "none").window == 1
    assert decide(profile, "fifo", "fixed:1MB,window=3").window == 3
    assert decide(profile, "caramel", "adaptive,window=1").window == 1


def test_adaptive_opens_the_window_only_if_messages_in_a_row_are_cheaper():
    profile = layered([(1 * MS, MB, 0)] * 20, SLOW)
    assert decide(profile).window == 2
    for effort in ("full", "quick"):
        assert decide(replace(profile, network=replace(SLOW, queued_seconds=None)), effort=effort).window == 1


def test_a_step_without_gradients_has_an_empty_plan():
    assert decide(made("a=1 b=1(a)", {}, FAST)) == BodyPlan(())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("caramel,adaptive", ("caramel", "adaptive")),
        (" fifo , fixed:8MB ", ("fifo", "fixed:8MB")),
        ("tac,mgwfbp,window=2", ("tac", "mgwfbp,window=2")),
        ("static", ("static", "")),
    ],
)
def test_parse_splits_order_and_batches(text: str, words: tuple[str, str]):
    assert parse(text) == words


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("caramle,adaptive", "'caramle' is not an order: fifo, tic, tac, caramel"),
        ("", "'' is not an order"),
        ("fifo", "the batches are missing: fifo,<batches> with none, fixed:<bytes>, mgwfbp, adaptive"),
        ("static,none", "'static' is not an order"),
        ("fifo,big", "'big' is none of none, fixed:<bytes>, mgwfbp, adaptive"),
        ("fifo,fixed", "'fixed' is none of none, fixed:<bytes>"),
        ("fifo,fixed:8XB", "'8XB' is not a number of bytes: 4096, 512KB, 8MB"),
        ("fifo,fixed:0", "'0' is not a number of bytes"),
        ("fifo,none,window=x", "'window=x' in 'none,window=x' is not an option: window=<number of messages>"),
        ("fifo,none,window=1,window=2", "'window=2' in"),
        ("fifo,none,depth=1", "'depth=1' in"),
    ],
)
def test_parse_says_what_is_wrong_and_what_is_allowed(text: str, wrong: str):
    with pytest.raises(InputError) as error:
        parse(text)
    assert wrong in str(error.value)


@pytest.mark.parametrize("words", [{"order": "static"}, {"effort": "some"}, {"batches": "fixed:MB"}])
def test_decide_refuses_words_it_does_not_know(words: dict[str, str]):
    with pytest.raises(InputError, match=next(iter(words))):
        decide(layered([(1 * MS, 1, 0)]), **words)
