"""What a pass is: a name, a one-line summary, options as dataclass fields, and `run(module, plan)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graph_passes.graph import Module


@dataclass(frozen=True)
class Batch:
    """One message to be: the collectives `members` of a body, to be sent under the name `name`."""

    name: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class BodyPlan:
    """What a plan means for one body, in names of its nodes.

    batches: in the order in which they are to be submitted; a member is a collective or one of its chunks.
    window: how many batches may be under way at once; 0: no edges between them. Those that are deferred go one by one.
    edges: (node, node that is to wait for it).  chunks: collective -> how many slices it is cut into.
    deferred: so many batches, the first ones, belong to the next step's forward pass.  phase: which of the functions is
    to be made then (`defer`); "whole": none is deferred.
    """

    batches: Sequence[Batch]
    window: int = 1
    edges: Sequence[tuple[str, str]] = ()
    chunks: Mapping[str, int] = field(default_factory=dict)
    deferred: int = 0
    phase: str = "whole"


Plan = Mapping[str, BodyPlan]  # body name -> what to do with it


@dataclass(frozen=True)
class PassResult:
    changed: bool
    statistics: dict[str, int] = field(default_factory=dict)


class Pass(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def needs_plan(self) -> bool: ...

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        """Changes the module's bodies in place and marks those it changed; raises GraphError if it cannot."""
