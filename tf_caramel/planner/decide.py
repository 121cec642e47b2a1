"""From a profile to a plan: the order's policy, then the batching's. `parse` reads how they are written in settings.

In text: "caramel,adaptive", "fifo,fixed:8MB", "tac,mgwfbp,window=2"; "static" alone: nothing is measured or decided.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tf_caramel.planner import search
from tf_caramel.planner.batches import batcher
from tf_caramel.planner.compress import compress
from tf_caramel.planner.order import POLICIES, Order, fifo, submission
from tf_caramel.planner.plan import BodyPlan
from tf_caramel.planner.profile import InputError, Profile
from tf_caramel.planner.structure import once_a_graph

STATIC = "static"
WINDOWS = (1, 2)  # that the adaptive batching chooses among
KEPT = 32  # orders and compressed profiles of a graph
_T = TypeVar("_T")
BATCHES = "none, fixed:<bytes>, mgwfbp, adaptive"


def parse(text: str) -> tuple[str, str]:
    """(order, batches) of "caramel,adaptive" or "fifo,fixed:8MB,window=2"; ("static", "") of "static".
    Raises InputError, which says what is wrong and what is allowed."""
    order, _, batches = (word.strip() for word in text.partition(","))
    if order == STATIC and not batches:
        return STATIC, ""
    if order not in POLICIES:
        raise InputError(f"plan {text!r}: {order!r} is not an order: {', '.join(POLICIES)} (or static alone)")
    if not batches:
        raise InputError(f"plan {text!r}: the batches are missing: {order},<batches> with {BATCHES}")
    _Batching.parse(batches)
    return order, batches


@dataclass(frozen=True)
class _Batching:
    """name: none, fixed:<bytes>, mgwfbp or adaptive.  window: None if the text has none."""

    name: str
    window: int | None

    @classmethod
    def parse(cls, text: str) -> _Batching:
        name, *options = (word.strip() for word in text.split(","))
        window = None
        for option in options:
            key, _, value = option.partition("=")
            if key != "window" or not value.isdecimal() or window is not None:
                raise InputError(f"batches: {option!r} in {text!r} is not an option: window=<number of messages>")
            window = int(value)
        if name != "adaptive":
            batcher(name)
        return cls(name, window)


def decide(profile: Profile, order: str = "caramel", batches: str = "adaptive", effort: str = "full") -> BodyPlan:
    """The plan for a step.

    batches: may end in ",window=<number>"; else 1, except that adaptive chooses. With caramel and adaptive, an order
    that does not pay in the simulator is not used.  effort: "quick" simulates a few candidates only (tables of
    what-ifs). Raises InputError for words it does not know.
    """
    if order not in POLICIES:
        raise InputError(f"order: {order!r} is none of {', '.join(POLICIES)}")
    if effort not in search.EFFORTS:
        raise InputError(f"effort: {effort!r} is none of {', '.join(search.EFFORTS)}")
    batching = _Batching.parse(batches)
    if not profile.transfers:
        return BodyPlan((), batching.window or 1)
    chosen = _order(profile, order)
    if batching.name != "adaptive":
        items = submission(profile, chosen)
        window = 1 if batching.window is None else batching.window
        return search.body_plan(batcher(batching.name)(items, profile.network), window, chosen.edges)
    orders = [chosen]
    if order == "caramel":  # of equal ones the first is taken, so edges have to pay
        without = [replace(chosen, edges=())] if effort == "full" else []
        orders = list(dict.fromkeys([fifo(profile), *without, chosen]))
    windows = WINDOWS if batching.window is None else (batching.window,)
    steps = [_compressed(profile, candidate.edges) for candidate in orders]
    return search.adaptive(profile, orders, steps, windows, search.EFFORTS[effort])


@once_a_graph
def _known(profile: Profile) -> dict[Any, Any]:
    """Orders and compressed profiles of a graph, filled by `_order` and `_compressed`: what-ifs ask again and again."""
    return {}


def _remembered(profile: Profile, key: Hashable, make: Callable[[], _T]) -> _T:
    known = _known(profile)
    found = known.get(key)
    if found is None:
        if len(known) >= KEPT:
            known.clear()
        found = known[key] = make()
    return cast(_T, found)


def _order(profile: Profile, policy: str) -> Order:
    return _remembered(profile, (policy, profile.network), lambda: POLICIES[policy](profile))


def _compressed(profile: Profile, edges: tuple[tuple[str, str], ...]) -> Profile:
    """The profile for the search. Its network is not to be used, it may be that of an earlier call."""
    return _remembered(profile, edges, lambda: compress(profile, edges))
