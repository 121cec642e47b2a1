"""From a profile to a plan: the order's policy, then the batching's. `parse` reads how they are written in settings.

In text: "caramel,adaptive", "fifo,fixed:8MB", "tac,mgwfbp,window=2", "caramel,adaptive,defer"; "static" alone: nothing
is measured or decided.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tf_caramel.planner import search
from tf_caramel.planner.batches import batcher
from tf_caramel.planner.compress import compress
from tf_caramel.planner.defer import deferrable, order_of, retime
from tf_caramel.planner.order import POLICIES, Order, due, fifo, submission
from tf_caramel.planner.plan import BodyPlan, Piece
from tf_caramel.planner.profile import InputError, Profile
from tf_caramel.planner.simulate import simulate
from tf_caramel.planner.splits import Member, Splits
from tf_caramel.planner.structure import once_a_graph, readiness

STATIC = "static"
WINDOWS = (1, 2)  # that the adaptive batching chooses among
WORTH_DEFERRING = 1e-3  # of the step: to win less is not worth the memory that keeps gradients
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
    """name: none, fixed:<bytes>, mgwfbp or adaptive.  window: None if the text has none.  defer: it is asked for."""

    name: str
    window: int | None
    defer: bool = False

    @classmethod
    def parse(cls, text: str) -> _Batching:
        name, *options = (word.strip() for word in text.split(","))
        window, defer = None, False
        for option in options:
            if option == "defer" and not defer:
                defer = True
                continue
            key, _, value = option.partition("=")
            if key != "window" or not value.isdecimal() or window is not None:
                raise InputError(
                    f"batches: {option!r} in {text!r} is not an option: window=<number of messages> or defer"
                )
            window = int(value)
        if name != "adaptive":
            batcher(name)
        return cls(name, window, defer)


def asks_for_deferral(batches: str) -> bool:
    """Raises InputError for batches it does not know."""
    return _Batching.parse(batches).defer


def decide(
    profile: Profile,
    order: str = "caramel",
    batches: str = "adaptive",
    effort: str = "full",
    defer: bool = False,
    plain: BodyPlan | None = None,
) -> BodyPlan:
    """The plan for a step.

    batches: may end in ",window=<number>"; else 1, except that adaptive chooses. With caramel and adaptive, an order
    that does not pay in the simulator is not used.  effort: "quick" simulates a few candidates only (tables of
    what-ifs).  defer, or batches that end in ",defer": transfers may be deferred, where that makes the simulated step
    shorter (by the share WORTH_DEFERRING).  plain: the plan of the same profile and policy without deferring, if the
    caller has it already. Raises InputError for words it does not know.
    """
    if order not in POLICIES:
        raise InputError(f"order: {order!r} is none of {', '.join(POLICIES)}")
    if effort not in search.EFFORTS:
        raise InputError(f"effort: {effort!r} is none of {', '.join(search.EFFORTS)}")
    batching = _Batching.parse(batches)
    if not profile.transfers:
        return BodyPlan((), batching.window or 1)
    policy = _Policy(profile, order, batching, search.EFFORTS[effort])
    plan = plain or policy.undeferred()
    return policy.deferred(plan) if defer or batching.defer else plan


def loosened(plan: BodyPlan) -> BodyPlan:
    """What is deferred as in `plan`; all else whole, each for itself, to be fused by Horovod as it comes.

    Where ranks compute on the cores that also send, gradients become ready in another order at every step. A batch
    waits for its last member, Horovod takes what is there, and no profile tells which is faster.
    """
    head = plan.batches[: plan.deferred]
    rest = dict.fromkeys(Piece(piece.transfer) for batch in plan.batches[plan.deferred :] for piece in batch)
    return BodyPlan((*head, *((piece,) for piece in rest)), 0, (), plan.deferred)


class _Policy:
    """Decides one profile by one order and batching."""

    def __init__(self, profile: Profile, order: str, batching: _Batching, effort: search.Effort):
        self._profile, self._batching, self._effort = profile, batching, effort
        chosen = _order(profile, order)
        self._orders = [chosen]
        adaptive = batching.name == "adaptive"
        if adaptive and order == "caramel":  # of equal ones the first is taken, so edges have to pay
            without = [replace(chosen, edges=())] if effort.starts else []
            self._orders = list(dict.fromkeys([fifo(profile), *without, chosen]))
        self._batcher = None if adaptive else batcher(batching.name)
        given = WINDOWS if adaptive else (1,)
        self._windows = given if batching.window is None else (batching.window,)

    def undeferred(self) -> BodyPlan:
        return self._plan(self._profile, self._orders, () if self._batcher else self._steps(), self._effort)

    def deferred(self, plan: BodyPlan) -> BodyPlan:
        """The best plan that defers transfers, or `plan` if deferring brings nothing."""
        candidates, splits = [], self._splits()
        effort = replace(self._effort, starts=min(self._effort.starts, len(splits)))
        for names in splits:
            there = retime(self._profile, names)
            orders = [order_of(there, self._profile, order) for order in self._orders]
            steps = [] if self._batcher else [retime(step, names) for step in self._steps()]
            candidates.append(self._plan(there, orders, steps, effort))
        limit = self._seconds(plan) * (1 - WORTH_DEFERRING)
        return min([c for c in candidates if self._seconds(c) < limit], key=self._seconds, default=plan)

    def _seconds(self, plan: BodyPlan) -> float:
        return round(simulate(self._profile, plan, detail=False).step_seconds, search.ROUNDED)

    def _plan(
        self, profile: Profile, orders: Sequence[Order], steps: Sequence[Profile], effort: search.Effort
    ) -> BodyPlan:
        if self._batcher is None:
            return search.adaptive(profile, orders, steps, self._windows, effort)
        batches = self._batcher(submission(profile, orders[0]), profile.network)
        return search.body_plan(batches, self._windows[-1], orders[0].edges)

    def _steps(self) -> list[Profile]:
        return [_compressed(self._profile, order.edges) for order in self._orders]

    def _splits(self) -> list[tuple[str, ...]]:
        """The sets of transfers to defer that look best on the compressed step, in few simulations."""
        profile, order = self._profile, self._orders[0]
        small = replace(_compressed(profile, order.edges), network=profile.network)
        allowed = set(deferrable(profile)).intersection(*map(deferrable, [small] if self._batcher else self._steps()))
        ready = dict(zip((t.name for t in profile.transfers), readiness(profile, order.edges), strict=True))
        dues = due(profile, allowed)
        members = [
            Member(t.name, t.bytes_, ready[t.name], dues[t.name]) for t in profile.transfers if t.name in allowed
        ]
        if not members:
            return []
        batcher_ = self._batcher or search.quick_batcher(profile.network)

        def judge(names: tuple[str, ...]) -> float:
            there = retime(small, names)
            items = submission(there, order_of(there, profile, order))
            plan = search.body_plan(batcher_(items, profile.network), self._windows[-1])
            return simulate(there, plan, detail=False).step_seconds

        effort = self._effort
        return Splits(members, profile.network, judge, effort.splits(small)).best(effort.finals(small))


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
