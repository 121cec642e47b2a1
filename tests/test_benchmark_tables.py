"""Figures, verdicts, tables and picture from cells made by hand."""

from __future__ import annotations

import pytest

from examples.benchmarks import arms
from examples.benchmarks.figures import PRODUCT, TUNED, figures
from examples.benchmarks.picture import draw
from examples.benchmarks.tables import markdown
from examples.benchmarks.targets import reached


def arm(*seconds, cpu=0.1):
    turn = {
        "seconds": list(seconds),
        "cpu_seconds": cpu,
        "sent_bytes": 1e6,
        "peak_bytes": 1e9,
        "again": 0,
        "foreign": 0.0,
    }
    return {"party": "p", "process": "p", "turns": [turn], "messages": 3.0}


def cell(**seconds):
    names = {"local": arms.LOCAL, "network": arms.NETWORK, "horovod": arms.AS_IT_COMES, "unfused": arms.UNFUSED,
             "measured": arms.MEASURED, "traced": arms.TRACED, "mwms": arms.MWMS}  # fmt: skip
    return {
        "arms": {names[key].name: arm(*value) for key, value in seconds.items()},
        "facts": {"p": {"first_step_seconds": 5.0}},
        "description": "a model",
        "tuning": {"quick": {}, "best": [], "cells": 36},
        "load": [0.0, 0.0, 0.0], "model": "resnet50", "batch": 16, "hosts": 2, "ground": "2 emulated hosts",
        "mbit": 1000, "emulated": True, "accelerator": None,
    }  # fmt: skip


USUAL = cell(local=[0.4], network=[1.0], horovod=[1.2], unfused=[3.0], measured=[1.1, 1.1, 1.3], traced=[1.2])


def results(**cells):
    return {"commands": ["make bench"], "machine": "a machine", "date": "today", "skipped": [], "cells": cells}


def test_efficiency_is_one_when_all_is_hidden_and_zero_when_nothing_is():
    f = figures(cell(local=[0.4], network=[1.0], horovod=[1.0], unfused=[1.4]))
    assert f.rows[arms.AS_IT_COMES.name].efficiency == pytest.approx(1)
    assert f.rows[arms.UNFUSED.name].efficiency == pytest.approx(0)
    assert f.rows[arms.UNFUSED.name].exposed == pytest.approx(1.0)


def test_bound_with_cpu_counts_what_communication_takes_from_the_core():
    made = cell(horovod=[1.2])
    made["arms"] |= {arms.LOCAL.name: arm(0.95, cpu=0.95), arms.NETWORK.name: arm(1.0, cpu=0.1)}
    assert (figures(made).bound, figures(made).bound_with_cpu) == (1.0, pytest.approx(1.05))


def test_bound_with_cpu_leaves_an_accelerator_that_waits_its_time():
    made = cell(horovod=[1.2])
    made["arms"] |= {arms.LOCAL.name: arm(0.95, cpu=0.05), arms.NETWORK.name: arm(1.0, cpu=0.1)}
    assert figures(made).bound_with_cpu == 1.0


def test_product_is_the_fastest_of_what_it_judges_among():
    f = figures(USUAL)
    assert f.rows[PRODUCT].same_as == arms.MEASURED.name
    assert f.rows[PRODUCT].seconds == 1.1


def test_best_of_tuned_is_never_slower_than_horovod_as_it_comes():
    made = cell(horovod=[1.2])
    made["arms"]["Horovod 8 MB"] = arm(1.3)
    made["tuning"]["best"] = ["Horovod 8 MB"]
    assert figures(made).rows[TUNED].seconds == 1.2


def test_target_that_the_bound_forbids_says_so():
    verdicts = {v.text: v for v in reached({"a": USUAL}, {"a": figures(USUAL)})}
    forbidden = next(v for text, v in verdicts.items() if text.startswith("1.15x"))
    assert "1.20 is possible" in forbidden.why  # 1.2 s of Horovod over the bound of 1.0 s
    assert next(v for text, v in verdicts.items() if text.startswith("0.98x")).verdict == "yes"
    assert next(v for text, v in verdicts.items() if text.startswith("1.7x over unfused")).measured.startswith("2.73")


def test_target_without_cells_is_not_measured():
    verdicts = reached({"a": USUAL}, {"a": figures(USUAL)})
    assert next(v for v in verdicts if "accelerator" in v.text).verdict == "not measured"


def test_tables_stand_without_plain_horovod(tmp_path):
    alone = cell(measured=[1.0], traced=[1.2])
    text = markdown(results(a=USUAL, b=alone))
    assert "| **tf_caramel** (measured) | 1000 |" in text
    draw(results(a=USUAL, b=alone), tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 1000
