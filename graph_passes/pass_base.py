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


# What a plan means for one module: body name -> its batches, in the order in which they are to be submitted.
Plan = Mapping[str, Sequence[Batch]]


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
