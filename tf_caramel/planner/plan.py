"""The plan: which pieces of gradients share a message, in which order messages are submitted, what is made to wait.

Plain data, JSON, the same on every rank. Gradients are named by their transfers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_caramel.planner.profile import InputError, Reader

FORMAT = "tf_caramel plan 1"


@dataclass(frozen=True, order=True)
class Piece:
    """A gradient, or the `part`-th of `parts` equal slices of it (a chunk). As text: "name" or "name[0/4]"."""

    transfer: str
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return self.transfer if self.parts == 1 else f"{self.transfer}[{self.part}/{self.parts}]"

    @classmethod
    def parse(cls, text: str) -> Piece:
        match = re.fullmatch(r"(.+)\[(\d+)/(\d+)\]", text)
        return cls(match[1], int(match[2]), int(match[3])) if match else cls(text)

    def bytes_of(self, whole: int) -> int:
        """Its share of `whole` bytes: slices differ by rounding only."""
        return whole * (self.part + 1) // self.parts - whole * self.part // self.parts


@dataclass(frozen=True)
class BodyPlan:
    """batches: messages in the order in which they are submitted.
    window: how many may be under way at once (batch k waits for the completion of batch k-window); 0: no edges, Horovod
    fuses what is ready. Those that are deferred go one by one whatever it is.
    edges: (op, op that is made to wait for it), names of ops of the body, from the compute order.
    deferred: so many first batches are those of the step before: they travel at the head of a step, in order of first
    use, and their updates run there.
    """

    batches: tuple[tuple[Piece, ...], ...]
    window: int = 1
    edges: tuple[tuple[str, str], ...] = ()
    deferred: int = 0

    @property
    def deferred_transfers(self) -> tuple[str, ...]:
        """Names of the transfers that are deferred, sorted."""
        return tuple(sorted({piece.transfer for batch in self.batches[: self.deferred] for piece in batch}))


@dataclass(frozen=True)
class Plan:
    """One BodyPlan for each body that holds collectives.  origin: which policies made it, for people."""

    bodies: tuple[BodyPlan, ...]
    origin: str = "static"

    def to_json(self) -> str:
        return json.dumps(self._data(), separators=(",", ":"))

    def _data(self) -> dict[str, Any]:
        bodies = [
            {"batches": [list(map(str, b)) for b in body.batches], "window": body.window, "edges": body.edges}
            | ({"deferred": body.deferred} if body.deferred else {})
            for body in self.bodies
        ]
        return {"format": FORMAT, "origin": self.origin, "bodies": bodies}

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Reads what `to_json` wrote. Raises InputError naming `source` and the field."""
        data = Reader.parse(text, source, FORMAT)
        bodies = []
        for body in data.items("bodies"):
            batches: Any = body.value.get("batches")
            if not _lists_of_text(batches) or not all(batches):
                raise body.error("batches", batches, "a list of lists of gradients")
            edges: Any = body.value.get("edges", [])
            if not _lists_of_text(edges) or not all(len(e) == 2 for e in edges):
                raise body.error("edges", edges, "a list of pairs of ops")
            deferred: Any = body.value.get("deferred", 0)
            if type(deferred) is not int or not 0 <= deferred <= len(batches):
                raise body.error("deferred", deferred, f"a whole number from 0 to {len(batches)}, that of batches")
            pieces = tuple(tuple(Piece.parse(p) for p in batch) for batch in batches)
            bodies.append(BodyPlan(pieces, body.count("window"), tuple((a, b) for a, b in edges), deferred))
        return cls(tuple(bodies), data.text("origin", "static"))

    @property
    def digest(self) -> str:
        return digest(self._data()["bodies"])


def check(
    plan: Plan,
    kinds: Sequence[Mapping[str, str | None]],
    source: str = "plan",
    obstacles: Sequence[Mapping[str, str]] = (),
) -> None:
    """Raises InputError unless the plan fits: every gradient once and whole, alike in each message, deferred or not.

    kinds: for each body, transfer -> its kind (None: it travels alone and whole).  obstacles: for each body,
    transfer -> why it cannot be deferred.
    """
    if len(plan.bodies) != len(kinds):
        raise InputError(
            f"{source}: bodies: {len(plan.bodies)} of them, but the step has {len(kinds)} with collectives"
        )
    for number, (body, known) in enumerate(zip(plan.bodies, kinds, strict=True)):
        where = f"{source}: bodies[{number}].batches"
        parts: dict[str, list[Piece]] = defaultdict(list)
        for k, batch in enumerate(body.batches):
            for piece in batch:
                if piece.transfer not in known:
                    raise InputError(f"{where}[{k}]: {str(piece)!r} is not a gradient of this step")
                parts[piece.transfer].append(piece)
                kind = known[piece.transfer]
                if kind is None and (len(batch) > 1 or piece.parts > 1):
                    raise InputError(f"{where}[{k}]: {piece.transfer!r} has to travel alone and whole")
                if kind != known[batch[0].transfer]:
                    raise InputError(
                        f"{where}[{k}]: {piece.transfer!r} cannot share a message with {batch[0].transfer!r}"
                    )
        for name in known:
            found = sorted(parts[name])
            if [(p.part, p.parts) for p in found] != [(i, len(found)) for i in range(len(found))] or not found:
                shown = ", ".join(map(str, found)) or "nothing"
                raise InputError(f"{where}: {name!r} must be sent once and whole, but the plan sends {shown}")
        _check_deferral(body, obstacles[number] if obstacles else {}, f"{source}: bodies[{number}].deferred")


def _check_deferral(body: BodyPlan, obstacles: Mapping[str, str], where: str) -> None:
    if not 0 <= body.deferred <= len(body.batches):
        raise InputError(f"{where}: {body.deferred}, but there are {len(body.batches)} batches")
    deferred = body.deferred_transfers
    split = {p.transfer for batch in body.batches[body.deferred :] for p in batch}.intersection(deferred)
    if split:
        raise InputError(f"{where}: of {min(split)!r} some chunks are deferred and some are not")
    for name in deferred:
        if name in obstacles:
            raise InputError(f"{where}: {name!r} cannot be deferred: {obstacles[name]}")


def _lists_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(x, list) and all(isinstance(text, str) for text in x) for x in value
    )


def digest(data: Any) -> str:
    """Ten hexadecimal digits that stand for plain data, whatever the order of its mappings."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:10]


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where two pieces of plain data differ first: "options.op: 'Sum' against 'Average'"; None if nowhere."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        pairs = [(f"{path}.{k}" if path else str(k), a.get(k, _ABSENT), b.get(k, _ABSENT)) for k in sorted({*a, *b})]
    elif isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str) and not isinstance(b, str):
        if len(a) != len(b):
            return f"{path}: {len(a)} of them against {len(b)}"
        pairs = [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if (type(a), a) == (type(b), b) else f"{path}: {a!r} against {b!r}"
    return next((found for where, x, y in pairs if (found := first_difference(x, y, where))), None)
