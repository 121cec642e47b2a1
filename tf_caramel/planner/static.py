"""The plan before anything was measured: batches by bytes, in the order in which gradients become ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_caramel.planner.plan import BodyPlan, Piece, Plan


@dataclass(frozen=True)
class Traced:
    """What the traced graph says of one transfer.

    bytes_: None when the trace did not know a dimension.  ready: when its gradient is there; any number that orders.
    kind: transfers may share a message only if their kinds are equal; None: it always travels alone.
    """

    name: str
    bytes_: int | None
    ready: int
    kind: str | None = None


def static_plan(bodies: Sequence[Sequence[Traced]], cap_bytes: int | None, window: int = 1) -> Plan:
    """Fills batches up to `cap_bytes` in order of readiness; a larger or unsized transfer travels alone.

    bodies: for each body, its transfers in traced order.  cap_bytes: None puts every transfer in a batch of its own.
    A batch is submitted when its last member is ready.
    """
    return Plan(tuple(BodyPlan(_batches(transfers, cap_bytes), window) for transfers in bodies))


def _batches(transfers: Sequence[Traced], cap_bytes: int | None) -> tuple[tuple[Piece, ...], ...]:
    closed: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    for number in sorted(range(len(transfers)), key=lambda n: (transfers[n].ready, n)):
        transfer = transfers[number]
        if cap_bytes is None or transfer.kind is None or transfer.bytes_ is None:
            closed.append([number])
            continue
        members, size = filling.get(transfer.kind, ([], 0))
        if members and size + transfer.bytes_ > cap_bytes:
            closed.append(members)
            members, size = [], 0
        filling[transfer.kind] = ([*members, number], size + transfer.bytes_)
    closed += [members for members, _ in filling.values()]

    def ready(members: list[int]) -> tuple[int, list[int]]:
        return max(transfers[n].ready for n in members), members

    return tuple(tuple(Piece(transfers[n].name) for n in members) for members in sorted(closed, key=ready))
