"""The plan: which transfers of a step share a message and in which order messages are submitted. Plain data, JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Transfer:
    """What the planner needs to know of one collective.

    bytes_: None when the trace did not know a dimension.  ready: when its gradient is there; any number that orders.
    kind: transfers may share a message only if their kinds are equal; None: it always travels alone.
    """

    bytes_: int | None
    ready: int
    kind: Hashable = None


@dataclass(frozen=True)
class Plan:
    """batches[body][k]: numbers of the transfers (in traced order) that travel in the k-th message of that body."""

    batches: tuple[tuple[tuple[int, ...], ...], ...]

    def to_json(self) -> str:
        return json.dumps({"batches": self.batches}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(tuple(tuple(tuple(b) for b in body) for body in json.loads(text)["batches"]))

    @property
    def digest(self) -> str:
        return digest({"batches": self.batches})


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
