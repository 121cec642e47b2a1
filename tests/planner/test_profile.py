"""The profile as data: JSON and back, one order for all files, and what is wrong with a file that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.profiles import resnet_like
from tf_caramel.planner.profile import InputError, Network, Op, Profile, Transfer

NETWORK = Network(2e-3, 1e-8, queued_seconds=1e-3, samples=((1024, 2.1e-3), (2**20, 13e-3)))
PROFILE = Profile(
    "k",
    (
        Op("loss", 0.5),
        Op("gradient", 0.25, (0,), start=0.5, gate=True),
        Op("sum", 0.0, (1,), start=0.75),
        Op("update", 0.125, (0, 2), start=1.0),
    ),
    (Transfer("w", 4096, 2, readers=(0,)),),
    NETWORK,
    cores=2.0,
    speeds=(1.0, 1.5),
)


def changed(path: str, value: Any) -> str:
    """PROFILE's file with another value at e.g. "ops.1.seconds"; ... takes the field away."""
    data = json.loads(PROFILE.to_json())
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    at = data
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(data)


def error_of(text: str) -> str:
    with pytest.raises(InputError) as error:
        Profile.from_json(text, "p.json")
    return str(error.value)


def test_a_profile_survives_json():
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    assert Profile.from_json(resnet_like().to_json()) == resnet_like()


@given(st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_the_order_of_a_file_does_not_matter(random):
    data = json.loads(resnet_like(2).to_json())
    for entries in (data["ops"], data["transfers"], *(op["inputs"] for op in data["ops"])):
        random.shuffle(entries)
    assert Profile.from_json(json.dumps(data)) == resnet_like(2)


def test_of_ops_that_may_run_the_one_seen_first_comes_first_then_names_decide():
    seen = {"a": 5.0, "b": 4.0, "c": 1.0, "d": 1.0, "e": 2.0}
    inputs = {"a": ["e"], "b": ["e"]}
    ops = [(name, 0.0, inputs.get(name, []), start, False) for name, start in seen.items()]
    assert [op.name for op in Profile.make("k", ops[::-1], [], NETWORK).ops] == ["c", "d", "e", "b", "a"]


def test_an_input_named_twice_counts_once():
    ops = [("a", 0.0, [], 0.0, False), ("b", 0.0, ["a", "a"], 1.0, False)]
    assert Profile.make("k", ops, [], NETWORK).ops[1].inputs == (0,)


def test_what_a_file_leaves_out_has_plain_values():
    data = json.loads(PROFILE.to_json())
    for name in ("cores", "speeds"):
        del data[name]
    data["network"] = {"start_up_seconds": 1, "seconds_per_byte": 2, "ranks": 3}
    del data["ops"][0]["start"], data["transfers"][0]["readers"], data["transfers"][0]["kind"]
    profile = Profile.from_json(json.dumps(data))
    assert (profile.cores, profile.speeds) == (1.0, (1.0, 1.0, 1.0))
    assert profile.network == Network(1.0, 2.0, ranks=3)
    assert (profile.ops[0].start, profile.transfers[0].readers, profile.transfers[0].kind) == (0.0, (), None)


def test_every_cut_off_file_is_an_error_that_says_so():
    text = PROFILE.to_json()
    for length in range(len(text)):
        assert error_of(text[:length]).startswith("p.json: cut off or not JSON")


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("format", "tf_caramel plan 1", "p.json: format: 'tf_caramel plan 1' is not 'tf_caramel profile 1'"),
        ("format", ..., "p.json: format: None is not"),
        ("key", ..., "p.json: key: missing, but it must be text"),
        ("key", 3, "p.json: key: 3, but it must be text"),
        ("cores", 0, "p.json: cores: 0.0, but it must be a number above 0"),
        ("speeds", [], "p.json: speeds: [], but it must be a list of numbers above 0"),
        ("speeds", [1.0, -1.0], "p.json: speeds: [1.0, -1.0], but it must be"),
        ("ops", {}, "p.json: ops: {}, but it must be a list of objects"),
        ("ops.0.name", ..., "p.json: ops[0].name: missing"),
        ("ops.1.seconds", float("nan"), "p.json: ops[1].seconds ('gradient'): nan, but it must be a number, 0 or more"),
        ("ops.1.seconds", float("inf"), "p.json: ops[1].seconds ('gradient'): inf"),
        ("ops.1.seconds", 10**400, "p.json: ops[1].seconds ('gradient'): 1000"),
        ("ops.1.seconds", -0.5, "p.json: ops[1].seconds ('gradient'): -0.5"),
        ("ops.1.seconds", "0.5", "p.json: ops[1].seconds ('gradient'): '0.5'"),
        ("ops.1.seconds", True, "p.json: ops[1].seconds ('gradient'): True"),
        ("ops.1.seconds", ..., "p.json: ops[1].seconds ('gradient'): missing"),
        ("ops.1.start", None, "p.json: ops[1].start ('gradient'): None"),
        ("ops.1.inputs", "loss", "p.json: ops[1].inputs ('gradient'): 'loss', but it must be a list of names"),
        ("ops.1.gate", 1, "p.json: ops[1].gate ('gradient'): 1, but it must be true or false"),
        ("ops.1.inputs", ["lost"], "p.json: op 'gradient' waits for 'lost', which is missing"),
        ("ops.3.name", "sum", "p.json: two ops are called 'sum'"),
        ("ops.0.inputs", ["update"], "p.json: the ops wait for each other in a circle: gradient, loss, sum, update"),
        ("ops.0.inputs", ["loss"], "p.json: the ops wait for each other in a circle: gradient, loss, sum, update"),
        ("transfers.0.bytes", -1, "p.json: transfers[0].bytes ('w'): -1, but it must be a whole number, 0 or more"),
        ("transfers.0.bytes", 1.5, "p.json: transfers[0].bytes ('w'): 1.5"),
        ("transfers.0.bytes", True, "p.json: transfers[0].bytes ('w'): True"),
        ("transfers.0.kind", 32, "p.json: transfers[0].kind ('w'): 32, but it must be text"),
        ("transfers.0.op", "lost", "p.json: transfer 'w' names the op 'lost', which is missing"),
        ("transfers.0.readers", ["lost"], "p.json: transfer 'w' names the op 'lost', which is missing"),
        ("network", [], "p.json: network: [], but it must be an object"),
        ("network.start_up_seconds", ..., "p.json: network.start_up_seconds: missing"),
        ("network.seconds_per_byte", -1e-9, "p.json: network.seconds_per_byte: -1e-09"),
        ("network.queued_seconds", float("nan"), "p.json: network.queued_seconds: nan"),
        ("network.ranks", 1.5, "p.json: network.ranks: 1.5"),
        ("network.samples", [[1]], "p.json: network.samples: [[1]], but it must be a list of [bytes, seconds]"),
        (
            "network.samples",
            [[1, "x"]],
            "p.json: network.samples: [[1, 'x']], but it must be a list of [bytes, seconds]",
        ),
        ("network.samples", [[1, float("nan")]], "p.json: network.samples: [[1, nan]], but it must be"),
        ("network.samples", [[-1, 1.0]], "p.json: network.samples: [[-1, 1.0]], but it must be"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_field(path: str, value: Any, found: str):
    assert error_of(changed(path, value)).startswith(found)


@pytest.mark.parametrize("what", ["name", "op"])
def test_two_transfers_cannot_have_one_name_or_one_collective(what: str):
    data = json.loads(PROFILE.to_json())
    other = {"name": "v", "bytes": 1, "op": "update", "kind": None}
    data["transfers"].append(other | {what: data["transfers"][0][what]})
    assert error_of(json.dumps(data)) == f"p.json: two transfers have the same {what}"


def test_a_message_in_a_row_may_start_faster():
    assert NETWORK.seconds(100) == pytest.approx(2e-3 + 1e-6)
    assert NETWORK.seconds(100, queued=True) == pytest.approx(1e-3 + 1e-6)
    assert Network(2e-3, 1e-8).seconds(100, queued=True) == pytest.approx(2e-3 + 1e-6)


def test_residuals_compare_samples_with_the_fit():
    assert Network(1.0, 0.5, samples=((2, 2.0), (4, 4.5))).residuals() == pytest.approx((0.0, 0.5))


def test_residuals_of_a_network_that_costs_nothing_are_no_error():
    assert Network(0.0, 0.0, samples=((0, 1.0),)).residuals() == (float("inf"),)


def test_compute_and_bytes_are_sums():
    assert PROFILE.compute_seconds == 0.875
    assert PROFILE.bytes_ == 4096
