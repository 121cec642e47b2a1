"""What the simulator says of more ranks than there are here, from the profile of a cell, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from examples.benchmarks import arms
from examples.benchmarks.figures import median
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.what_if import HOROVOD, UNFUSED, what_if

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# What the simulator calls a policy, and the arm that it is.
POLICIES = {
    HOROVOD: arms.AS_IT_COMES.name,
    UNFUSED: arms.UNFUSED.name,
    "fifo+fixed:8MB": arms.policy("fifo,fixed:8MB").name,
    "caramel+adaptive": arms.MEASURED.name,
}


def scaled(cell: Mapping[str, Any], ranks: Sequence[int] = RANKS) -> dict[int, dict[str, float]]:
    """ranks -> policy -> simulated seconds of a step, on the cell's link; nothing if the cell has no profile."""
    profiles = [told["profile"] for told in cell.get("planning", {}).values() if "profile" in told]
    if not profiles:
        return {}
    rows = what_if(Profile.from_json(profiles[0]), ranks, [None], list(POLICIES))
    return {row.ranks: dict(zip(POLICIES, (o.step_seconds for o in row.outcomes), strict=True)) for row in rows}


def errors(cell: Mapping[str, Any], simulated: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """policy -> (measured seconds, how far the simulator is off) where the cell measured it."""
    found = {}
    for policy, name in POLICIES.items():
        if name in cell["arms"]:
            measured = median(cell["arms"][name])
            found[policy] = (measured, simulated[policy] / measured - 1)
    return found
