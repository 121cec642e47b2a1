"""The network model: what is fitted to samples, and what an all-reduce costs on another set-up. Closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tf_caramel.planner.network import at, fit
from tf_caramel.planner.profile import Network

MB = 2**20
# Measured on 4 ranks: 3 ms to start, of which 6 hops, and 1.5 shares of a 1 Gbit/s link for each byte.
FOUR = Network(3e-3, 12e-9, queued_seconds=1e-3, cpu_seconds_per_message=4e-4, cpu_seconds_per_byte=3e-9, ranks=4)


def line(a: float, b: float, *sizes: int) -> list[tuple[int, float]]:
    return [(n, a + b * n) for n in sizes]


def test_samples_on_a_line_give_that_line():
    assert fit(line(2e-3, 9e-9, 65536, MB, 8 * MB)) == pytest.approx((2e-3, 9e-9), rel=1e-9)


def test_a_small_sample_counts_like_a_large_one():
    # Least squares of the errors themselves would put a near 67, to be nearer to the large ones.
    assert fit([(1, 101.0), (1_000_000, 1e6), (2_000_000, 2e6)]) == pytest.approx((100, 1), rel=1e-3)


def test_relative_errors_are_balanced():
    # Two measurements of each size, one 1/(1-e), one 1/(1+e) of the truth: the relative errors cancel on the truth.
    truth = line(1e-3, 1e-8, 1000, 1_000_000)
    assert fit([(n, t / (1 + e)) for n, t in truth for e in (-0.2, 0.2)]) == pytest.approx(
        (1e-3 / 1.04, 1e-8 / 1.04), rel=1e-9
    )


def test_no_start_up_below_zero():
    a, b = fit([(1000, 1.0), (2000, 4.0)])  # the line through both meets 0 at 667 bytes
    assert a == 0
    assert b == pytest.approx((1000 + 500) / (1000**2 + 500**2))


def test_no_byte_below_zero():
    a, b = fit([(1000, 2.0), (2000, 1.0)])
    assert b == 0
    assert a == pytest.approx((0.5 + 1) / (0.5**2 + 1**2))


def test_residuals_are_those_of_the_fit():
    samples = tuple(line(1e-3, 1e-8, 1000, MB))
    a, b = fit(samples)
    assert Network(a, b, samples=samples).residuals() == pytest.approx((0, 0), abs=1e-9)
    assert Network(a / 2, 0.0, samples=samples[:1]).residuals() == pytest.approx((1 + 2 * 1e-2,), rel=1e-6)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "no samples"),
        ([(1000, 1.0), (1000, 2.0)], "all samples are of 1000 bytes"),
        ([(1000, 1.0), (2000, 0.0)], "2000 bytes in 0.0 s"),
        ([(1000, 1.0), (0, 1.0)], "0 bytes in 1.0 s"),
        ([(1000, 1.0), (2000, float("nan"))], "2000 bytes in nan s"),
        ([(1000, float("inf")), (2000, 1.0)], "1000 bytes in inf s"),
    ],
)
def test_samples_that_make_no_line_are_refused(samples, said):
    with pytest.raises(ValueError, match=said):
        fit(samples)


def test_where_it_was_measured_nothing_changes():
    for latency in (None, 50e-6):
        found = at(FOUR, 4, latency_seconds=latency)
        assert (found.seconds(0), found.seconds(0, queued=True)) == pytest.approx((3e-3, 1e-3))
        assert found.seconds(MB) == pytest.approx(FOUR.seconds(MB))
        assert found.cpu_seconds(MB) == pytest.approx(FOUR.cpu_seconds(MB))


@pytest.mark.parametrize(
    ("collective", "ranks", "hops", "share"),
    [
        ("ring", 1, 0, 0),
        ("ring", 2, 2, 1),
        ("ring", 10, 18, 1.8),
        ("halving-doubling", 1, 0, 0),
        ("halving-doubling", 2, 2, 1),
        ("halving-doubling", 8, 6, 1.75),
        ("halving-doubling", 9, 6 + 2, 1.75 + 2),
        ("halving-doubling", 15, 6 + 2, 1.75 + 2),
        ("halving-doubling", 1024, 20, 2 * 1023 / 1024),
        ("tree", 1, 0, 0),
        ("tree", 2, 2, 2),
        ("tree", 8, 6, 6),
        ("tree", 9, 8, 8),
    ],
)
def test_an_all_reduce_costs_what_the_formula_says(collective, ranks, hops, share):
    free = replace(FOUR, cpu_seconds_per_byte=0.0)
    found = at(free, ranks, gbit=8, latency_seconds=100e-6, collective=collective)
    software = 3e-3 - 6 * 100e-6
    assert found.start_up_seconds == pytest.approx(software + hops * 100e-6)
    assert found.seconds_per_byte == pytest.approx(share * 1e-9)
    assert found.queued_seconds == pytest.approx(1e-3 - 6 * 100e-6 + hops * 100e-6)


def test_without_a_latency_all_of_the_start_up_is_software():
    assert at(FOUR, 1024, gbit=1).start_up_seconds == 3e-3


def test_hops_that_would_cost_more_than_was_measured_leave_no_software():
    assert at(FOUR, 2, gbit=1, latency_seconds=1e-3).start_up_seconds == pytest.approx(2e-3)


def test_without_a_speed_the_link_is_the_measured_one():
    # 1.5 shares were 12 ns, so the link takes 8 ns a byte.
    assert at(FOUR, 2).seconds_per_byte == pytest.approx(8e-9)
    assert at(FOUR, 8, collective="tree").seconds_per_byte == pytest.approx(6 * 8e-9)


def test_no_link_makes_software_faster_than_its_core():
    found = at(FOUR, 2, gbit=1000)
    assert found.seconds_per_byte == found.cpu_seconds_per_byte == pytest.approx(3e-9 / 1.5)


def test_a_message_costs_the_core_what_it_did_and_a_copy_too():
    found = at(replace(FOUR, copy_seconds_per_byte=1e-10), 64, gbit=10)
    assert (found.cpu_seconds_per_message, found.copy_seconds_per_byte) == (4e-4, 1e-10)


def test_what_if_knows_no_samples_and_no_queue_that_was_not_measured():
    found = at(replace(FOUR, queued_seconds=None, samples=((1, 1.0),)), 8)
    assert (found.ranks, found.samples, found.queued_seconds) == (8, (), None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 0}, "ranks: 0"),
        ({"ranks": 2, "gbit": 0.0}, "gbit: 0.0"),
        ({"ranks": 2, "gbit": float("nan")}, "gbit: nan"),
        ({"ranks": 2, "latency_seconds": -1.0}, "latency: -1.0"),
        ({"ranks": 2, "collective": "star"}, "'star' is none of ring"),
    ],
)
def test_a_set_up_that_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        at(FOUR, **options)


def test_one_rank_says_nothing_about_a_link():
    alone = replace(FOUR, ranks=1)
    with pytest.raises(ValueError, match="measured on one rank"):
        at(alone, 4)
    assert at(alone, 4, gbit=8).seconds_per_byte == pytest.approx(3e-9)  # 1.5 ns of link, 3 ns of core
