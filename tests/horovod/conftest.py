"""Runs that several tests look at: each is started once."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from tests import ranks

SMALL = {"TF_CARAMEL": "1", "TF_CARAMEL_PIPELINE": "inline,regroup(cap=1KB),order(window=1)"}
KERAS_3 = metadata.version("keras").startswith("3")
KERAS = ["keras", *(["tf_keras"] if importlib.util.find_spec("tf_keras") else [])]
KERAS_2 = [k for k in KERAS if k == "tf_keras" or not KERAS_3]  # where Horovod's own optimizer works
SHARED = (
    "train_sgd",
    "joined_batch",
    "branch_on_one_rank",
    "dense_before_sparse",
    "reduction_options",
    "keeps_state",
    "keras_callbacks",
    "nested_functions",
    "partial_batch",
    "nothing_to_do",
    "loss_scale",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def matrix(folder) -> Callable[..., list[dict[str, Any]]]:
    """matrix(keras, hvd, rewritten): the reports of workers/matrix.py."""

    @functools.cache
    def run(keras: str, hvd: bool, rewritten: bool) -> list[dict[str, Any]]:
        env = {"KERAS": keras, "HVD": "1" if hvd else "", **(SMALL if rewritten else {})}
        return ranks.reports(ranks.start("matrix.py", env=env, folder=folder, limit_seconds=300))

    return run


@pytest.fixture(scope="session")
def shared(folder) -> Callable[..., list[ranks.Rank]]:
    """shared(keras): two ranks, TF_CARAMEL=1, that ran all the cases of SHARED."""

    @functools.cache
    def run(keras: str) -> list[ranks.Rank]:
        env = {"TF_CARAMEL": "1", "KERAS": keras}
        done = ranks.start("cases.py", *SHARED, env=env, folder=folder, limit_seconds=300)
        ranks.reports(done)
        return done

    return run


@pytest.fixture(params=KERAS)
def case(request, shared) -> Callable[[str], list[dict[str, Any]]]:
    """case(name): what each rank reported of one of the SHARED cases, for every Keras."""
    return lambda name: [rank.of(name) for rank in shared(request.param)]
