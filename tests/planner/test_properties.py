"""What holds of the simulator for any step, any plan and any network."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.draw import EIGHTHS, patient, plans, profiles
from tf_caramel.planner.plan import BodyPlan, Piece
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.simulate import Outcome, simulate

EPS = 1e-9


def travelled(profile: Profile, outcome: Outcome) -> float:
    """Seconds of the messages, had nothing slowed them."""
    ends = [float("-inf"), *(m.end for m in outcome.messages)]
    return sum(
        profile.network.seconds(m.bytes_, queued=m.submitted < end)
        for m, end in zip(outcome.messages, ends, strict=False)
    )


@patient
@given(st.data(), st.integers(1, 2))
def test_every_plan_without_a_circle_ends_and_sends_everything_once(data: st.DataObject, streams: int):
    profile = data.draw(profiles(speeds=(1.0, 1.5)))
    plan = data.draw(st.none() | plans(profile))
    outcome = simulate(profile, plan, streams=streams)
    assert sum(m.bytes_ for m in outcome.messages) == profile.bytes_
    sent = [piece for m in outcome.messages for piece in m.pieces]
    assert sorted(sent) == sorted(
        [str(p) for b in plan.batches for p in b] if plan else [t.name for t in profile.transfers]
    )


@patient
@given(st.data(), st.integers(1, 2))
def test_a_step_takes_as_long_as_its_compute_and_as_its_messages(data: st.DataObject, streams: int):
    profile = data.draw(profiles(speeds=(1.0, 1.5)))
    outcome = simulate(profile, data.draw(st.none() | plans(profile)), streams=streams)
    assert outcome.step_seconds >= max(outcome.compute_seconds / streams, travelled(profile, outcome)) - EPS


@patient
@given(st.data(), st.integers(1, 2))
def test_a_step_takes_no_longer_than_its_compute_and_its_messages_one_after_the_other(
    data: st.DataObject, streams: int
):
    """Of equal ranks one op or message is always under way. Sharing cores loses nothing in sum from one core on: while
    both run, compute goes on at (cores-s)/cores and the message at s/f, with s = min(f, cores/(cores+1)); that is 1 or
    more together if cores >= 1. Below one core it is less, and the bound does not hold.
    """
    profile = data.draw(profiles())
    outcome = simulate(profile, data.draw(st.none() | plans(profile)), streams=streams, cycle_seconds=0)
    assert outcome.step_seconds <= outcome.compute_seconds + travelled(profile, outcome) + EPS


@patient
@given(st.data())
def test_what_a_step_does_is_the_same_in_any_order(data: st.DataObject):
    profile = data.draw(profiles(speeds=(1.0, 1.5)))
    one, other = (simulate(profile, data.draw(plans(profile, chunks=False))) for _ in range(2))
    assert one.compute_seconds == pytest.approx(other.compute_seconds)
    assert sum(m.bytes_ for m in one.messages) == sum(m.bytes_ for m in other.messages)


@patient
@given(st.data(), st.randoms(use_true_random=False))
def test_the_order_of_the_ops_in_the_file_does_not_matter(data: st.DataObject, random: st.random.Random):
    profile = data.draw(profiles(speeds=(1.0, 1.5)))
    content = json.loads(profile.to_json())
    for name in ("ops", "transfers"):
        random.shuffle(content[name])
    plan = data.draw(st.none() | plans(profile))
    assert simulate(Profile.from_json(json.dumps(content)), plan) == simulate(profile, plan)


@patient
@given(st.data(), EIGHTHS)
def test_a_longer_start_up_never_makes_a_step_with_one_message_shorter(data: st.DataObject, more: float):
    profile = data.draw(profiles(kinds="a"))
    collectives = {t.op for t in profile.transfers}
    late = set()  # ops that wait for a transfer
    for k, op in enumerate(profile.ops):
        if late.union(collectives).intersection(op.inputs):
            late.add(k)
    alone = tuple(t for t in profile.transfers if t.op not in late)
    profile = replace(profile, transfers=alone)
    plan = BodyPlan((tuple(Piece(t.name) for t in alone),) if alone else ())
    slower = replace(profile.network, start_up_seconds=profile.network.start_up_seconds + more)
    assert simulate(profile, plan, network=slower).step_seconds >= simulate(profile, plan).step_seconds - EPS


@patient
@given(st.data(), st.integers(1, 2), st.sampled_from([0.0, 0.5, 0.99]))
def test_a_message_can_end_later_by_its_slack_and_no_more(data: st.DataObject, streams: int, share: float):
    profile = data.draw(profiles())
    plan = data.draw(plans(profile))
    outcome = simulate(profile, plan, streams=streams, spans=True)
    for k, message in enumerate(outcome.messages):
        assert message.slack >= 0
        assert replayed(profile, plan, outcome, k, share * message.slack) == pytest.approx(outcome.step_seconds)
        assert replayed(profile, plan, outcome, k, message.slack + 1) == pytest.approx(outcome.step_seconds + 1)


def replayed(profile: Profile, plan: BodyPlan, outcome: Outcome, late: int, delay: float) -> float:
    """The end of the step if all runs in the order in which it ran and for as long, but one message ends later."""
    messages, spans = outcome.messages, outcome.spans
    after: dict[object, list[object]] = defaultdict(list)
    takes: dict[object, float] = {s.name: s.end - s.start for s in spans}
    for k, message in enumerate(messages):
        takes[k] = message.end - message.start + (delay if k == late else 0)
        after[k] += [k - 1] if k else []
    for k, span in enumerate(spans):
        after[span.name] += [s.name for s in spans[:k] if s.stream == span.stream][-1:]
    names = [op.name for op in profile.ops]
    inputs = {op.name: [names[i] for i in op.inputs] + [a for a, b in plan.edges if b == op.name] for op in profile.ops}
    for transfer in profile.transfers:
        collective = names[transfer.op]
        carriers = [k for k, m in enumerate(messages) if transfer.name in {Piece.parse(p).transfer for p in m.pieces}]
        for k in carriers:
            after[k] += inputs[collective]
        inputs[collective] = carriers
    for name in names:
        after[name] += inputs[name]
    ends: dict[object, float] = {}
    for node in TopologicalSorter(after).static_order():
        ends[node] = max((ends[n] for n in after[node]), default=0.0) + takes.get(node, 0.0)
    return max(ends.values())
