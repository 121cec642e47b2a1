"""Runs a pipeline: parses its textual form, runs each pass, verifies every changed body after it, counts what it did.

A pipeline is text like "inline,regroup(cap=8MB),order(window=1)". Deciding is not the passes' work: before the first
pass that needs a plan, the manager asks `decide` for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from graph_passes.chunk import Chunk
from graph_passes.defer import Defer
from graph_passes.graph import GraphError, Module, verify
from graph_passes.inline import Inline
from graph_passes.order import Order
from graph_passes.pass_base import Pass, Plan
from graph_passes.regroup import Regroup
from graph_passes.schedule import Schedule
from graph_passes.untie import Untie

# In the only order that makes sense: edges cannot cross bodies, and what is ordered are the batches.
PASSES: dict[str, Any] = {
    "inline": Inline,
    "untie": Untie,
    "chunk": Chunk,
    "regroup": Regroup,
    "order": Order,
    "schedule": Schedule,
    "defer": Defer,
}
DEFAULT = "inline,untie,chunk,regroup(cap=8MB),order(window=1),schedule,defer"
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


class PassError(GraphError):
    """A pass failed; the text names it."""


def parse(text: str) -> list[Pass]:
    """The passes of a pipeline text. Raises ValueError naming the part that is wrong and what is allowed."""
    passes: list[Pass] = []
    rest = text.strip()
    while rest:
        match = re.match(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*(?:,(?=\s*\S)|$)", rest)
        if not match:
            raise ValueError(f"cannot read {rest!r}: a pipeline looks like {DEFAULT!r}")
        passes.append(_make(match[1], match[2] or ""))
        rest = rest[match.end() :]
    if not passes:
        raise ValueError(f"empty: a pipeline looks like {DEFAULT!r}")
    names = [p.name for p in passes]
    if names != [name for name in PASSES if name in names]:
        raise ValueError(f"{','.join(names)}: passes come at most once, in the order {','.join(PASSES)}")
    return passes


def _make(name: str, arguments: str) -> Pass:
    if name not in PASSES:
        raise ValueError(f"no pass is called {name!r}; there are {', '.join(PASSES)}")
    known = {f.name: f.metadata.get("unit") for f in fields(PASSES[name]) if f.metadata.get("option", True)}
    options: dict[str, int] = {}
    for item in filter(None, (x.strip() for x in arguments.split(","))):
        key, _, value = (x.strip() for x in item.partition("="))
        if key in options:
            raise ValueError(f"{name}: {key} is given twice")
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}; it has {', '.join(known) or 'none'}")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", value, re.IGNORECASE)
        if not match or (match[2] and known[key] != "bytes"):
            wanted = "a number of bytes or a size like 8MB" if known[key] == "bytes" else "a number"
            raise ValueError(f"{name}({item}): {value!r} is not {wanted}")
        number = float(match[1]) * _UNITS[(match[2] or "").upper()]  # inf, if it has hundreds of digits
        if not number.is_integer():
            raise ValueError(f"{name}({item}): {value!r} is not a whole number")
        options[key] = int(number)
    made: Pass = PASSES[name](**options)
    return made


def run(
    passes: Sequence[Pass],
    module: Module,
    decide: Callable[[Module], Plan],
    outputs: Callable[[Any], int | None] | None = None,
    observe: Callable[[str, Module], None] = lambda label, module: None,
) -> dict[str, dict[str, int]]:
    """Runs the passes over the module in place and returns each pass's statistics.

    decide: called once, before the first pass that needs a plan; what it raises is passed on as it is.
    outputs: number of outputs of a node, for the verifier.  observe: called with a label before and after each pass.
    Raises PassError naming the pass when one fails or leaves a malformed graph.
    """
    statistics: dict[str, dict[str, int]] = {}
    plan: Plan | None = None
    observe("before", module)
    for one in passes:
        if one.needs_plan and plan is None:
            plan = decide(module)
        try:
            result = one.run(module, plan)
            for body in module.bodies.values():
                if body.changed:
                    verify(body, outputs)
        except Exception as error:
            raise PassError(f"pass {one.name} failed: {error}") from error
        statistics[one.name] = result.statistics
        observe(f"after_{one.name}", module)
    return statistics
