"""defer: the transfers and updates of a plan's deferred batches run at the head of the next step.

A step function becomes one of three. "start": nothing is pending; the deferred batches' gradients, and what their
updates take from this step, are kept in pending variables. "middle": first sends and applies what the step before
kept, each reader of a parameter waiting for its update only, then keeps its own. "flush": the head alone. Each body
in between that holds the step in a loop starts the loop with its first turn.

The stage variable says how far each got: whoever looks after a call that failed can tell whether something is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graph_passes import ops
from graph_passes.deferral import Followers, Needs, Resources, followers, needs
from graph_passes.graph import Body, GraphError, GraphView, Module, join, reached, split
from graph_passes.loops import callers, start_in_callers, take, touched_outside
from graph_passes.pass_base import BodyPlan, PassResult, Plan

WHOLE, START, MIDDLE, FLUSH = "whole", "start", "middle", "flush"
PENDING = "caramel_pending"
STAGE = "stage"  # last part of the name of an int64 variable on the host, whose values are
APPLIED, APPLYING, KEPT = 0, 1, 2  # nothing is pending; some of what was pending may be applied; all is pending
_HOST = "/device:CPU:0"
_JOIN = "caramel_kept"  # runs when everything pending is kept, or everything pending is applied
_GATES = frozenset({"IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"})


@dataclass(frozen=True)
class Defer:
    """known: body -> its `prospects`, if whoever runs the pass has them already."""

    known: Mapping[str, Sequence[Followers]] = field(default_factory=dict, metadata={"option": False})

    name = "defer"
    summary = "send and apply the last batches in the next step's forward pass"
    needs_plan = True

    def run(self, module: Module, plan: Plan | None) -> PassResult:
        kept = moved = 0
        for body_name, body_plan in sorted((plan or {}).items()):
            if body_plan.phase == WHOLE or not body_plan.deferred:
                continue
            body = module.bodies[body_name]
            found = self.known.get(body_name) or prospects(module, body)
            split_ = _Split(body, body_plan, found)
            kept, moved = kept + len(split_.pending), moved + len(split_.moved)
            if body_plan.phase == FLUSH:
                module.bodies = {body_name: split_.flush()}
            elif body_plan.phase == MIDDLE:
                take(body, split_.middle())
            else:
                starting, going_on = split_.start(), split_.middle()
                start_in_callers(module, body, starting, going_on)
        return PassResult(changed=moved > 0, statistics={"pending": kept, "ops moved": moved})


def prospects(module: Module, body: Body) -> list[Followers]:
    """What would move with each collective of a body, and why it cannot, if so."""
    view = GraphView(body)
    found = followers(body, [name for name in view.order if ops.is_collective(view.nodes[name])])
    try:
        path = callers(module, body)
    except GraphError as error:
        return [replace(one, obstacle=one.obstacle or str(error)) for one in found]
    result = []
    for one in found:
        handle, other = next(((h, o) for h in sorted(one.written) if (o := touched_outside(path, h))), ("", None))
        outside = f"{handle} is touched outside the step, by {other}" if other else None
        result.append(replace(one, obstacle=one.obstacle or outside))
    return result


@dataclass(frozen=True)
class _Pending:
    """tensor: what is kept.  name: of the pending variable.  dtype: its number.  shape: as text; "?": unknown.

    TensorFlow rewrites arithmetic in other ways, which round differently, where it does not know shapes.
    """

    tensor: str
    name: str
    dtype: int
    shape: str


class _Split:
    """A body, and what of it moves."""

    def __init__(self, body: Body, plan: BodyPlan, prospects_: Sequence[Followers]) -> None:
        self.body, self.plan = body, plan
        view = GraphView(body)
        self.batches = [b.name if b.name in view.nodes else b.members[0] for b in plan.batches[: plan.deferred]]
        found = {one.collective: one for one in prospects_}
        self.sets: list[Followers] = [found[name] for name in self.batches]
        for one in self.sets:
            if one.obstacle:
                raise GraphError(f"{body.name}: {one.collective} cannot be deferred: {one.obstacle}")
        self.moved = {name for one in self.sets for name in one.moved}
        self.needs: Needs = needs(view, self.sets)
        self.pending = self._pending(view)
        self.gates = self._gates(view)

    def _pending(self, view: GraphView) -> list[_Pending]:
        found = []
        # Batches' names say whose they are; a collective that is a batch alone may have the name of another step's.
        names = [b.name for b in self.plan.batches]
        for name, batch in zip(names, self.batches, strict=False):
            dtype = view.nodes[batch].attr["T"].type
            shapes = {k: s.decode() for k, s in enumerate(view.nodes[batch].attr[ops.SHAPE_ATTR].list.s)}
            for k, tensor in enumerate(view.data_inputs(batch)):
                found.append(_Pending(join(*split(tensor)), f"{PENDING}/{name}/{k}", dtype, shapes.get(k, "?")))
        for k, tensor in enumerate(self.needs.kept):
            source, index = split(tensor)
            dtype = ops.output_dtype(view.nodes[source])
            if dtype is None or (index and view.nodes[source].op not in ops.GROUPED):
                raise GraphError(f"{self.body.name}: {tensor} ({view.nodes[source].op}) would have to be kept")
            shape = "" if ops.SCALAR_ATTR in view.nodes[source].attr else "?"
            found.append(_Pending(tensor, f"{PENDING}/{names[0]}/value{k}", dtype, shape))
        return found

    def _gates(self, view: GraphView) -> list[str]:
        """What brings the step's data: if that fails, nothing pending may have been touched."""
        args = [a for a in self.body.args if view.nodes[a].attr["dtype"].type != ops.DT_RESOURCE]
        return [*args, *(n for n in view.order if view.nodes[n].op in _GATES and n not in self.moved)]

    @property
    def stage(self) -> str:
        return stage_name(self.plan)

    # The three

    def start(self) -> Body:
        body = self._copy()
        _remove(body, self.moved)
        self._keep(GraphView(body), {}, [])
        return body

    def middle(self) -> Body:
        body = self._copy()
        view = GraphView(body)
        reads = self._head(view, [f"^{gate}" for gate in self.gates])
        self._make_readers_wait(view)
        self._keep(view, reads, [f"^{self._applied(view)}"])
        return body

    def flush(self) -> Body:
        """Only the head, which takes those arguments that it needs.

        It returns a constant: where nothing is returned, TensorFlow rewrites arithmetic less and rounds differently.
        """
        body = self._copy()
        view = GraphView(body)
        self._head(view, [])
        applied = self._applied(view)
        done = view.add(_JOIN, "NoOp", [f"^{applied}"])
        needed = {done.name, *reached(view.producers, [done.name])}
        _remove(body, set(view.nodes) - needed)
        args = [a for a in body.args if a in needed]
        stage = join(*split(view.data_inputs(applied)[1]))
        return replace(body, args=args, ret={STAGE: stage}, control_ret={_JOIN: _JOIN})

    def _copy(self) -> Body:
        return replace(self.body.copied(), changed=True)

    # The head

    def _head(self, view: GraphView, gates: Sequence[str]) -> dict[str, str]:
        """Moves the moved nodes off this step: they take what is pending. Returns pending variable -> its read."""
        reads = {}
        for one in self.pending:
            handle = _handle(view, one.name, one.dtype, one.shape)
            node = view.add(f"{one.name}/read", "ReadVariableOp", [handle, *gates])
            node.attr["dtype"].type = one.dtype
            reads[one.name] = node.name
        values = {p.tensor: reads[p.name] for p in self.pending[len(self.pending) - len(self.needs.kept) :]}
        clones = {name: f"{name}/caramel_again" for name in self.needs.cloned}
        for name in self.needs.cloned:
            _clone(view, name, clones, values, gates if view.nodes[name].op in ops.READS_ONLY else ())
        position = 0
        for k, batch in enumerate(self.batches):
            count = len(view.data_inputs(batch))
            inputs = [reads[p.name] for p in self.pending[position : position + count]]
            self._rewire(view, batch, inputs, clones)
            if k:
                # One by one, whatever the window: all are ready when the step begins, and the forward pass waits for
                # the first one. Two that are let in within a cycle of Horovod's, as by a completion and by the updates
                # that it allows, are submitted in reverse or fused.
                view.add_control_input(batch, self.batches[k - 1])
            position += count
        for name in sorted(self.moved - set(self.batches)):
            inputs = [_redirected(x, values, clones) for x in view.data_inputs(name)]
            self._rewire(view, name, inputs, clones)
        applying = self._mark(view, "applying", APPLYING, gates)
        for batch in self.batches:  # whatever else moved comes after one of them
            view.add_control_input(batch, applying)
        return reads

    def _applied(self, view: GraphView) -> str:
        return self._mark(view, "applied", APPLIED, [f"^{name}" for name in sorted(self.moved)])

    def _mark(self, view: GraphView, label: str, stage: int, after: Sequence[str]) -> str:
        """Writes the stage variable, after those control inputs."""
        handle = _handle(view, self.stage, ops.DT_INT64, "", _HOST)
        value = view.add(f"{self.stage}/{label}/value", "Const", [], _HOST)
        value.attr["dtype"].type = value.attr["value"].tensor.dtype = ops.DT_INT64
        value.attr["value"].tensor.tensor_shape.SetInParent()
        value.attr["value"].tensor.int64_val.append(stage)
        node = view.add(f"{self.stage}/{label}", "AssignVariableOp", [handle, value.name, *after], _HOST)
        node.attr["dtype"].type = ops.DT_INT64
        node.attr["validate_shape"].b = False
        return str(node.name)

    def _rewire(self, view: GraphView, name: str, inputs: Sequence[str], clones: dict[str, str]) -> None:
        controls = [split(x)[0] for x in view.nodes[name].input if x.startswith("^")]
        stays = [f"^{clones.get(c, c)}" for c in controls if c in self.moved or c in clones]
        _set_inputs(view, name, [*inputs, *dict.fromkeys(stays)])

    def _make_readers_wait(self, view: GraphView) -> None:
        resources = Resources(view)
        heads = self.moved | {f"{name}/caramel_again" for name in self.needs.cloned}
        for one in self.sets:
            for handle in sorted(one.written):
                for name in resources.touching[handle]:
                    if name not in heads:
                        for source in one.touched[handle] if resources.writes(name) else one.written[handle]:
                            view.add_control_input(name, source)

    # The tail

    def _keep(self, view: GraphView, reads: dict[str, str], after: Sequence[str]) -> None:
        """Keeps what becomes pending, and makes the function wait for it where it waited for the moved nodes."""
        stores = []
        for one in self.pending:
            handle = _handle(view, one.name, one.dtype, one.shape)
            before = [f"^{reads[one.name]}"] if one.name in reads else []
            node = view.add(f"{one.name}/keep", "AssignVariableOp", [handle, one.tensor, *before])
            node.attr["dtype"].type = one.dtype
            node.attr["validate_shape"].b = False
            stores.append(node.name)
        targets = [n for n in view.body.control_ret.values() if n in self.moved]
        present = [n for n in dict.fromkeys(targets) if n in view.nodes]
        # Of a step that fails elsewhere nothing is pending: its other updates were not applied either.
        others = [f"^{n}" for n in dict.fromkeys(view.body.control_ret.values()) if n not in self.moved]
        kept = self._mark(view, "kept", KEPT, [*(f"^{n}" for n in stores), *after, *others])
        done = view.add(_JOIN, "NoOp", [f"^{n}" for n in (kept, *present)])
        if targets:
            ends = {key: done.name if n in self.moved else n for key, n in view.body.control_ret.items()}
            view.body.control_ret.update(ends)
        elif view.body.control_ret:
            key = min(view.body.control_ret)
            view.add_control_input(done.name, view.body.control_ret[key])
            view.body.control_ret[key] = done.name
        else:
            raise GraphError(f"{view.body.name}: it waits for nothing when it ends, so nothing can be kept at its end")


def stage_name(plan: BodyPlan) -> str:
    """Of the stage variable that belongs to what a plan defers."""
    return f"{PENDING}/{plan.batches[0].name}/{STAGE}"


def _handle(view: GraphView, name: str, dtype: int, shape: str, device: str = "") -> str:
    """The handle of a variable of ours."""
    if name not in view.nodes:
        node = view.add(name, "VarHandleOp", [], device)
        node.attr["dtype"].type = dtype
        node.attr["shape"].shape.SetInParent()
        if shape == "?":
            node.attr["shape"].shape.unknown_rank = True
        for size in shape.split(",") if shape not in ("", "?") else []:
            node.attr["shape"].shape.dim.add().size = -1 if size == "?" else int(size)
        node.attr["shared_name"].s = name.encode()
        node.attr["container"].s = b""
    return name


def _clone(view: GraphView, name: str, clones: dict[str, str], values: dict[str, str], gates: Iterable[str]) -> None:
    node = view.nodes[name]
    inputs = [_redirected(x, values, clones) for x in view.data_inputs(name)]
    made = view.add(clones[name], node.op, [*inputs, *gates], node.device)
    for key in node.attr:
        if key != "_class":
            made.attr[key].CopyFrom(node.attr[key])


def _redirected(tensor: str, values: dict[str, str], clones: dict[str, str]) -> str:
    name, index = split(tensor)
    kept = values.get(join(name, index))
    return kept or (join(clones[name], index) if name in clones else tensor)


def _set_inputs(view: GraphView, name: str, inputs: Sequence[str]) -> None:
    node = view.nodes[name]
    del node.input[:]
    node.input.extend(inputs)
    view.forget()


def _remove(body: Body, gone: set[str]) -> None:
    """Removes nodes whose data nobody else takes; nobody waits for them any more."""
    for i in reversed([i for i, node in enumerate(body.graph.node) if node.name in gone]):
        del body.graph.node[i]
    for node in body.graph.node:
        if any(split(x)[0] in gone for x in node.input):
            inputs = [x for x in node.input if split(x)[0] not in gone]
            del node.input[:]
            node.input.extend(inputs)
        if "_class" in node.attr:
            places = [p for p in node.attr["_class"].list.s if p.decode().removeprefix("loc:@") not in gone]
            del node.attr["_class"].list.s[:]
            node.attr["_class"].list.s.extend(places)


def copied(module: Module) -> Module:
    """A copy that passes may change."""
    return Module({name: body.copied() for name, body in module.bodies.items()})
