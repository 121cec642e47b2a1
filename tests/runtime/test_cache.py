"""The cache: what one run keeps, the next one finds; what is spoilt is named."""

from __future__ import annotations

import logging

import pytest

from tests.planner.profiles import chain
from tf_caramel.planner.plan import BodyPlan, Piece, Plan
from tf_caramel.planner.profile import InputError
from tf_caramel.planner.record import Record
from tf_caramel.runtime.cache import Cache

PLAN = Plan((BodyPlan(((Piece("a"),), (Piece("b"),))),), "fifo,none")


def kept(folder, chosen="measured", key="k"):
    cache = Cache(str(folder))
    cache.save(key, chain(2), PLAN, Record("k", "step", chosen=chosen))
    return cache


def test_what_was_kept_is_found(tmp_path):
    plan, record = kept(tmp_path).load("k")
    assert (plan, record.chosen) == (PLAN, "measured")
    assert sorted(p.name for p in (tmp_path / "k").iterdir()) == ["plan.json", "profile.json", "record.json"]


def test_of_a_function_that_runs_as_traced_there_is_no_plan_to_begin_with(tmp_path):
    plan, record = kept(tmp_path, chosen="traced").load("k")
    assert (plan, record.chosen) == (None, "traced")


def test_nothing_is_found_where_nothing_was_kept(tmp_path):
    assert kept(tmp_path).load("other") is None
    assert Cache(None).load("k") is None
    Cache(None).save("k", chain(2), PLAN, Record("k", "step"))


@pytest.mark.parametrize("name", ["plan.json", "record.json"])
def test_a_file_cut_off_is_named(tmp_path, name):
    cache = kept(tmp_path)
    file = tmp_path / "k" / name
    file.write_text(file.read_text()[:-9])
    with pytest.raises(InputError, match=f"{name}: cut off"):
        cache.load("k")


def test_a_missing_plan_is_an_error_that_names_it(tmp_path):
    cache = kept(tmp_path)
    (tmp_path / "k" / "plan.json").unlink()
    with pytest.raises(InputError, match=r"plan\.json"):
        cache.load("k")


def test_a_record_of_another_step_is_refused(tmp_path):
    cache = kept(tmp_path, key="copied")
    with pytest.raises(InputError, match="'k' is of another step than 'copied'"):
        cache.load("copied")


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="tf_caramel"):
        kept(tmp_path / "file")
    assert "is not kept in" in caplog.text
