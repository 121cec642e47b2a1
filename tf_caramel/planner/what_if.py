"""What-ifs: the step of a profile on other networks and numbers of ranks, under several policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tf_caramel.planner.decide import STATIC, asks_for_deferral, decide, parse
from tf_caramel.planner.network import at
from tf_caramel.planner.profile import InputError, Profile
from tf_caramel.planner.simulate import FUSION_BYTES, Outcome, simulate

FORMAT = "tf_caramel what-if 1"
HOROVOD, UNFUSED = "horovod", "unfused"  # as it comes, and with HOROVOD_FUSION_THRESHOLD=0
POLICIES = (HOROVOD, UNFUSED, "fifo+fixed:8MB", "caramel+adaptive")


@dataclass(frozen=True)
class Row:
    """One set-up.  gbit: None for the link that was measured.  outcomes: of each policy, without messages and spans."""

    ranks: int
    gbit: float | None
    outcomes: tuple[Outcome, ...]


def what_if(
    profile: Profile,
    ranks: Sequence[int],
    gbits: Sequence[float | None],
    policies: Sequence[str] = POLICIES,
    *,
    latency_seconds: float | None = None,
    collective: str = "ring",
    effort: str = "quick",
) -> list[Row]:
    """A row for each number of ranks and link, as `network.at` understands them.

    policies: horovod, unfused, or <order>+<batches> as in settings, with + for the comma ("caramel+adaptive+defer"
    defers transfers that are known to be deferrable). Each is decided anew for each
    network. Raises InputError for words it does not know and for set-ups that cannot be.
    """
    rows = []
    for policy in policies:
        _parsed(policy)
    for gbit in gbits:
        for count in ranks:
            there = replace(profile, network=at(profile.network, count, gbit, latency_seconds, collective))
            rows.append(Row(count, gbit, tuple(_outcome(there, policy, effort) for policy in policies)))
    return rows


def defers(policy: str) -> bool:
    """Whether a policy asks for deferral. Raises InputError for words it does not know."""
    parsed = _parsed(policy)
    return parsed is not None and asks_for_deferral(parsed[1])


def scaling(profile: Profile, outcome: Outcome) -> float:
    """Compute alone over the step: 1 is the work of so many lone ranks."""
    alone = profile.compute_seconds * max(profile.speeds)
    return alone / outcome.step_seconds if outcome.step_seconds else 1.0


def to_data(profile: Profile, rows: Sequence[Row], policies: Sequence[str]) -> dict[str, Any]:
    """As plain data: one object for each set-up and policy. Times in seconds."""
    outcomes = [
        {
            "ranks": row.ranks,
            "gbit": row.gbit,
            "policy": policy,
            "step_seconds": outcome.step_seconds,
            "efficiency": outcome.efficiency,
            "scaling": scaling(profile, outcome),
            "exposed_seconds": outcome.exposed_seconds,
        }
        | ({"deferred_bytes": outcome.deferred_bytes} if defers(policy) else {})
        for row in rows
        for policy, outcome in zip(policies, row.outcomes, strict=True)
    ]
    return {"format": FORMAT, "key": profile.key, "compute_seconds": profile.compute_seconds, "outcomes": outcomes}


def _parsed(policy: str) -> tuple[str, str] | None:
    """(order, batches) for `decide`; None for Horovod itself."""
    if policy in (HOROVOD, UNFUSED):
        return None
    order, batches = parse(policy.replace("+", ","))
    if order == STATIC:
        raise InputError(f"policy {policy!r}: the static plan is made from the graph as traced, not from a profile")
    return order, batches


def _outcome(profile: Profile, policy: str, effort: str) -> Outcome:
    parsed = _parsed(policy)
    if parsed is None:
        fusion_bytes = 0 if policy == UNFUSED else FUSION_BYTES
        return simulate(profile, None, fusion_bytes=fusion_bytes, detail=False)
    return simulate(profile, decide(profile, *parsed, effort=effort), detail=False)
