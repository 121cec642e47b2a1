"""What would have to move if a collective's transfer and updates ran at the head of the next step. Reads only.

Of a collective c moves what takes its result, and whatever touches a variable after these have written it (its slots,
a moving average). Of what the moved ops need besides, state of the updates is read anew, constants stay shared, and
every other value (learning rate, bias corrections) is kept from the step that computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from graph_passes import ops
from graph_passes.graph import Body, GraphView, join, reached, split


@dataclass(frozen=True)
class Followers:
    """What depends on one collective.

    moved: it and what moves with it, in topological order.  written: handle of a variable -> moved nodes that write it.
    touched: handle -> moved nodes that read or write it.
    obstacle: why none of it can be moved; None if it can.
    """

    collective: str
    moved: tuple[str, ...]
    written: Mapping[str, tuple[str, ...]]
    touched: Mapping[str, tuple[str, ...]]
    obstacle: str | None = None


@dataclass(frozen=True)
class Needs:
    """What moved nodes take from elsewhere.

    cloned: nodes that are computed anew at the head, in topological order: reads of state and what is made of them.
    kept: tensors whose values have to be kept until then.
    """

    cloned: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass
class Resources:
    """Which nodes of a body touch which resources."""

    view: GraphView
    _known: dict[str, str | None] = field(default_factory=dict)

    def handle(self, tensor: str) -> str | None:
        """The argument or VarHandleOp that the tensor hands on; None if it is not a resource."""
        name = split(tensor)[0]
        if name not in self._known:
            node = self.view.nodes[name]
            found: str | None = None
            if node.op == "VarHandleOp" or (node.op == "Placeholder" and node.attr["dtype"].type == ops.DT_RESOURCE):
                found = name
            elif node.op == "Identity":
                found = self.handle(node.input[0])
            self._known[name] = found
        return self._known[name]

    def of(self, name: str) -> list[str]:
        """Handles of the resources that a node reads or writes."""
        if self.view.nodes[name].op in ("Identity", "VarHandleOp", "Placeholder"):
            return []
        found = (self.handle(x) for x in self.view.data_inputs(name))
        return list(dict.fromkeys(h for h in found if h is not None))

    def writes(self, name: str) -> bool:
        """Of a node that touches resources: may it change them? A call may."""
        return self.view.nodes[name].op not in ops.READS_ONLY

    @cached_property
    def touching(self) -> dict[str, list[str]]:
        """handle -> the nodes that touch it, in topological order."""
        found: dict[str, list[str]] = {}
        for name in self.view.order:
            for handle in self.of(name):
                found.setdefault(handle, []).append(name)
        return found


def followers(body: Body, collectives: Iterable[str]) -> list[Followers]:
    """Of each collective, alone. What would move with several of them can move with none."""
    view = GraphView(body)
    resources = Resources(view)
    found = [_follow(view, resources, name) for name in collectives]
    owners: dict[str, list[int]] = {}
    for k, one in enumerate(found):
        for name in one.moved:
            owners.setdefault(name, []).append(k)
    shared = {k: name for name, who in owners.items() if len(who) > 1 for k in who}
    why = "needs several reduced gradients (clipping by the global norm, a check of all of them)"
    return [
        replace(one, obstacle=f"{shared[k]} {why}") if k in shared and not one.obstacle else one
        for k, one in enumerate(found)
    ]


def _follow(view: GraphView, resources: Resources, collective: str) -> Followers:
    moved = {collective}
    fresh = [collective]
    while fresh:
        for name in _readers(view, fresh):  # data
            if name not in moved:
                moved.add(name)
                fresh.append(name)
        written = {h: [n] for n in fresh if resources.writes(n) for h in resources.of(n)}
        fresh = []
        for handle, writers in sorted(written.items()):  # state: who touches a variable after it was written
            after = reached(view.consumers, writers)
            for name in resources.touching[handle]:
                if name in after and name not in moved:
                    moved.add(name)
                    fresh.append(name)
    ordered = tuple(sorted(moved, key=view.order.__getitem__))
    touched: dict[str, list[str]] = {}
    for name in ordered:
        for handle in resources.of(name):
            touched.setdefault(handle, []).append(name)
    written_by = {h: tuple(n for n in names if resources.writes(n)) for h, names in touched.items()}
    written_by = {h: names for h, names in written_by.items() if names}
    return Followers(
        collective,
        ordered,
        written_by,
        {h: tuple(names) for h, names in touched.items()},
        _obstacle(view, resources, collective, ordered, written_by, touched),
    )


def _readers(view: GraphView, names: Sequence[str]) -> list[str]:
    """Everything that data of these nodes flows into, directly or not."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        for consumer in view.consumers[name]:
            if consumer not in found and any(split(x)[0] == name for x in view.data_inputs(consumer)):
                found[consumer] = None
                waiting.append(consumer)
    return list(found)


def _obstacle(
    view: GraphView,
    resources: Resources,
    collective: str,
    moved: Sequence[str],
    written: Mapping[str, Sequence[str]],
    touched: Mapping[str, Sequence[str]],
) -> str | None:
    if not written:
        return f"{collective} updates no variable"
    returned = {split(tensor)[0] for tensor in view.body.ret.values()}
    for name in moved:
        node = view.nodes[name]
        if name != collective and ops.is_collective(node):
            return f"another collective, {name}, depends on it"
        if name in returned:
            return f"{name} is returned, and depends on the reduced gradient"
        if node.op in ops.IMMOVABLE or ops.is_call(node):
            return f"{name} ({node.op}) depends on the reduced gradient, and may do more than compute"
    inside = set(moved)
    for handle, names in sorted(touched.items()):
        others = [n for n in resources.touching[handle] if n not in inside and resources.writes(n)]
        if handle not in written and others:
            return f"{handle} is read by the update and written by {others[0]}"
        for other in others:
            after = reached(view.consumers, [other])
            late = next((n for n in names if n not in after), None)
            if late is not None:
                return f"{handle} is also written by {other}, and nothing says whether before {late}"
    return None


def needs(view: GraphView, sets: Sequence[Followers]) -> Needs:
    """What the moved nodes of `sets` take from elsewhere, the collectives' own gradients not among it."""
    moved = {name for one in sets for name in one.moved}
    kinds = _kinds(view, moved, {handle for one in sets for handle in one.written})
    cloned: dict[str, None] = {}
    kept: dict[str, None] = {}

    def take(tensor: str) -> None:
        name = split(tensor)[0]
        if name in moved or name in cloned or kinds[name] == FIXED:
            return
        if kinds[name] == VALUE:
            kept[join(*split(tensor))] = None
            return
        cloned[name] = None
        for x in view.data_inputs(name):
            take(x)

    collectives = {one.collective for one in sets}
    for one in sets:
        for name in one.moved:
            if name not in collectives:
                for tensor in view.data_inputs(name):
                    take(tensor)
    return Needs(tuple(sorted(cloned, key=view.order.__getitem__)), tuple(kept))


# What a node that stays where it is gives: the same at every step; what can be computed anew at the head of the next
# step, because it is made of state of the updates; what has to be kept.
FIXED, AGAIN, VALUE = "fixed", "again", "value"


def _kinds(view: GraphView, moved: set[str], state: set[str]) -> dict[str, str]:
    resources = Resources(view)
    kinds: dict[str, str] = {}
    for name in view.order:
        node = view.nodes[name]
        if name in moved:
            continue
        if node.op in ("Const", "VarHandleOp") or resources.handle(name):
            kinds[name] = FIXED
        elif node.op in ops.READS_ONLY:
            kinds[name] = AGAIN if _reads_state(view, resources, name, moved, state) else VALUE
        elif node.op in ops.IMMOVABLE or ops.is_update(node) or ops.is_collective(node) or ops.is_call(node):
            kinds[name] = VALUE
        else:
            of_inputs = {kinds.get(split(x)[0], VALUE) for x in view.data_inputs(name)} or {VALUE}
            kinds[name] = next(k for k in (AGAIN, VALUE, FIXED) if k in of_inputs)
        if kinds[name] == FIXED and any(x.startswith("^") for x in node.input):
            kinds[name] = AGAIN  # it waits for something in this step
    return kinds


def _reads_state(view: GraphView, resources: Resources, name: str, moved: set[str], state: set[str]) -> bool:
    """Does it read state of the updates as it still is at the head of the next step? Not if others write it later."""
    handles = resources.of(name)
    return set(handles) <= state and not any(
        resources.writes(other) and other not in moved and name not in reached(view.consumers, [other])
        for handle in handles
        for other in resources.touching[handle]
    )
