"""What-ifs: a row for each set-up, each policy simulated on the network that the set-up has."""

from __future__ import annotations

import pytest

from tests.planner.profiles import chain
from tf_caramel.planner.decide import decide
from tf_caramel.planner.network import at
from tf_caramel.planner.profile import InputError
from tf_caramel.planner.simulate import simulate
from tf_caramel.planner.what_if import scaling, to_data, what_if

PROFILE = chain(4)


def test_rows_go_through_the_ranks_of_one_link_after_the_other():
    rows = what_if(PROFILE, [2, 4], [1.0, None], ["horovod"])
    assert [(row.gbit, row.ranks) for row in rows] == [(1.0, 2), (1.0, 4), (None, 2), (None, 4)]


def test_where_it_was_measured_horovod_takes_what_it_takes_there():
    (row,) = what_if(PROFILE, [2], [None], ["horovod"])
    assert row.outcomes == (simulate(PROFILE, None, detail=False),)


def test_unfused_sends_each_gradient_alone():
    quick = chain(8, seconds=1e-4)
    (row,) = what_if(quick, [2], [None], ["unfused", "horovod"])
    assert row.outcomes[0] == simulate(quick, None, fusion_bytes=0, detail=False)
    assert row.outcomes[0] != row.outcomes[1]


def test_a_policy_decides_on_the_network_of_its_row():
    (row,) = what_if(PROFILE, [64], [10.0], ["fifo+fixed:2MB"], latency_seconds=50e-6, collective="tree")
    there = at(PROFILE.network, 64, 10.0, 50e-6, "tree")
    plan = decide(PROFILE, "fifo", "fixed:2MB")
    assert row.outcomes == (simulate(PROFILE, plan, network=there, detail=False),)


def test_scaling_is_compute_alone_over_the_step():
    (row,) = what_if(chain(4, speeds=(1.0, 1.5)), [2], [None], ["horovod"])
    outcome = row.outcomes[0]
    assert scaling(chain(4, speeds=(1.0, 1.5)), outcome) == pytest.approx(
        1.5 * PROFILE.compute_seconds / outcome.step_seconds
    )


def test_as_data_each_set_up_and_policy_is_an_object():
    rows = what_if(PROFILE, [2, 4], [1.0], ["horovod", "unfused"])
    data = to_data(PROFILE, rows, ["horovod", "unfused"])["outcomes"]
    assert [(d["ranks"], d["policy"]) for d in data] == [(2, "horovod"), (2, "unfused"), (4, "horovod"), (4, "unfused")]
    assert data[3]["step_seconds"] == rows[1].outcomes[1].step_seconds


@pytest.mark.parametrize(
    ("policy", "said"), [("best+adaptive", "'best' is not an order"), ("caramel+most", "most"), ("static", "static")]
)
def test_a_policy_that_nobody_knows_is_refused_before_anything_is_simulated(policy, said):
    with pytest.raises(InputError, match=said):
        what_if(PROFILE, [], [], ["horovod", policy])
