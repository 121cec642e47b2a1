"""The plan before anything was measured: batches by bytes, in the order in which gradients become ready."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tf_caramel.planner.plan import Plan, Transfer


def static_plan(bodies: Sequence[Sequence[Transfer]], cap_bytes: int | None) -> Plan:
    """Fills batches up to `cap_bytes` in order of readiness; a larger or unsized transfer travels alone.

    bodies: for each body, its transfers in traced order.  cap_bytes: None puts every transfer in a batch of its own.
    A batch is submitted when its last member is ready.
    """
    return Plan(tuple(_batches(transfers, cap_bytes) for transfers in bodies))


def _batches(transfers: Sequence[Transfer], cap_bytes: int | None) -> tuple[tuple[int, ...], ...]:
    closed: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
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

    return tuple(tuple(members) for members in sorted(closed, key=ready))
