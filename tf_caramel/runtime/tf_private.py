"""The only file that touches private parts of TensorFlow, and the self-test that says whether they still work.

Relied on (same in 2.15.1 and 2.21.0): `transform.FUNC_GRAPH_TRANSFORMS`, `transform.CONCRETE_FUNCTION_CALLBACKS`,
`ConcreteFunction._inference_function` and `._delayed_rewrite_functions._inference_function`, `AtomicFunction(...)`,
`function_def_to_graph.function_def_to_graph_def` and `._get_num_args`, `op_def_registry.get`,
`Context.get_function_def / add_function_def / remove_function / has_function`, `control_flow_util`,
`config.is_op_determinism_enabled`; `Dataset._inputs` and `._functions`; for tracing, which does without if they are
gone: `_pywrap_profiler.ProfilerSession` and `tsl.profiler.protobuf.trace_events_pb2`.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2, op_def_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function, transform
from tensorflow.python.framework import config, function_def_to_graph, op_def_registry
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util

from graph_passes import ops
from graph_passes.graph import Body, Module

MARK = "_caramel"  # on a FunctionDef that we made
_unique = itertools.count()


def inside_function() -> bool:
    return bool(tf_ops.inside_function())


def in_xla(graph: Any) -> bool:
    """Is code being traced into `graph` going to be compiled by XLA (jit_compile=True)?"""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def is_branch(graph: Any) -> bool:
    """Is `graph` itself the branch of a tf.cond?"""
    return type(graph).__name__ == "CondBranchFuncGraph"


def on_stack(class_name: str) -> bool:
    """Is a method being called of an object whose class's name begins so (Keras 2 appends a V3)?"""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__.startswith(class_name):
            return True
        frame = frame.f_back
    return False


def output_count(node: Any) -> int | None:
    op_def = op_def_registry.get(node.op)
    if op_def is None:
        return None
    return sum(function_def_to_graph._get_num_args(arg, node) for arg in op_def.output_arg)


def add_hooks(on_graph: Callable[[Any], None], on_function: Callable[[Any], None]) -> None:
    """on_graph: after each trace, before the FunctionDef exists.  on_function: each new ConcreteFunction."""
    transform.FUNC_GRAPH_TRANSFORMS.append(on_graph)
    transform.CONCRETE_FUNCTION_CALLBACKS.append(on_function)


def remove_hooks(on_graph: Callable[[Any], None], on_function: Callable[[Any], None]) -> None:
    graphs, functions = transform.FUNC_GRAPH_TRANSFORMS, transform.CONCRETE_FUNCTION_CALLBACKS
    for hooks, mine in ((graphs, on_graph), (functions, on_function)):
        if mine in hooks:
            hooks.remove(mine)


def function_name(concrete: Any) -> str:
    return name_of(concrete._inference_function)


def name_of(function: Any) -> str:
    """Of what a ConcreteFunction runs."""
    name = function.name
    return name.decode() if isinstance(name, bytes) else str(name)


def function_defs(root: str) -> dict[str, Any]:
    """The FunctionDef `root` and every one reachable from it by name, children first."""
    defs: dict[str, Any] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:  # as deep as calls nest
        if name in seen or not context.context().has_function(name):
            return
        seen.add(name)
        fdef = context.context().get_function_def(name)
        for node in fdef.node_def:
            for ref in ops.function_refs(node):
                visit(ref.name)
        defs[name] = fdef

    visit(root)
    return defs


def to_module(defs: dict[str, Any]) -> Module:
    return Module({name: _to_body(fdef) for name, fdef in defs.items()})


def _to_body(fdef: Any) -> Body:
    with tf_ops.init_scope():  # function look-ups go to the eager context, not to a graph being traced
        graph, flat = function_def_to_graph.function_def_to_graph_def(fdef)
    return Body(
        name=fdef.signature.name,
        graph=graph,
        args=[arg.name for arg in fdef.signature.input_arg],
        ret={arg.name: flat[fdef.ret[arg.name]] for arg in fdef.signature.output_arg},
        control_ret={name: fdef.control_ret[name] for name in sorted(fdef.control_ret)},
        xla=ops.is_xla(fdef.attr),
        source=fdef,
    )


def _to_function_def(body: Body, name: str) -> Any:
    fdef = function_pb2.FunctionDef()
    fdef.CopyFrom(body.source)  # signature, argument and function attributes stay
    fdef.signature.name = name
    _fit_signature(fdef, body)
    fdef.attr[MARK].CopyFrom(attr_value_pb2.AttrValue(b=True))
    del fdef.node_def[:]
    fdef.ret.clear()
    fdef.control_ret.clear()
    arguments = set(body.args)
    nested = {f"{a}:0": a for a in body.args}
    for node in body.graph.node:
        if node.name in arguments:
            continue
        op_def = op_def_registry.get(node.op)
        if op_def is None:
            raise ValueError(f"{body.name}: op {node.op} of {node.name} is not registered")
        index = 0
        for arg in op_def.output_arg:
            for k in range(function_def_to_graph._get_num_args(arg, node)):
                nested[f"{node.name}:{index}"] = f"{node.name}:{arg.name}:{k}"
                index += 1

    def canonical(tensor: str) -> str:
        return tensor if tensor.startswith("^") else nested[tensor if ":" in tensor else tensor + ":0"]

    for node in body.graph.node:
        if node.name not in arguments:
            copy = fdef.node_def.add()
            copy.CopyFrom(node)
            del copy.input[:]
            copy.input.extend(canonical(x) for x in node.input)
    for key, tensor in body.ret.items():
        fdef.ret[key] = canonical(tensor)
    for key, node_name in body.control_ret.items():
        fdef.control_ret[key] = node_name
    return fdef


def _fit_signature(fdef: Any, body: Body) -> None:
    """Leaves those arguments and outputs in the signature that the body has."""
    if [arg.name for arg in fdef.signature.input_arg] != body.args:
        given = {arg.name: arg for arg in body.source.signature.input_arg}
        del fdef.signature.input_arg[:]
        fdef.signature.input_arg.extend(given[name] for name in body.args)
        fdef.arg_attr.clear()
        fdef.resource_arg_unique_id.clear()
        fdef.attr.pop("_input_shapes", None)
    if [arg.name for arg in fdef.signature.output_arg] != list(body.ret):
        kept = [arg for arg in body.source.signature.output_arg if arg.name in body.ret]
        known = {arg.name for arg in kept}
        nodes = {node.name: node for node in body.graph.node}
        for name, tensor in body.ret.items():
            if name not in known:
                dtype = ops.output_dtype(nodes[tensor.partition(":")[0]])
                kept.append(op_def_pb2.OpDef.ArgDef(name=name, type=dtype))
        del fdef.signature.output_arg[:]
        fdef.signature.output_arg.extend(kept)
    fdef.signature.control_output[:] = list(body.control_ret)


class _Owned:
    """Keeps a generated library function registered exactly as long as the function that calls it."""

    def __init__(self, name: str) -> None:
        owner = context.context()
        weakref.finalize(self, lambda: owner.has_function(name) and owner.remove_function(name))


class _Rewritten(atomic_function.AtomicFunction):
    owned: list[_Owned]


class Dispatch(atomic_function.AtomicFunction):
    """Stands where a ConcreteFunction has its function, and asks `around(dispatch, args)` to run each eager call.

    arm: the function that runs when one is needed inside another graph.
    """

    arm: Any
    around: Callable[[Dispatch, tuple[Any, ...]], Any]

    def call_flat(self, *args: Any) -> Any:
        if self._bound_context.executing_eagerly():
            return self.around(self, args)
        return self.arm.call_flat(*args)


def original(concrete: Any) -> Any:
    """The function that TensorFlow traced."""
    return getattr(concrete, "_caramel_original", None) or concrete._inference_function


def build(concrete: Any, module: Module) -> Any:
    """Registers the module's changed bodies under new names; returns what runs them in `concrete`'s place."""
    owner = context.context()
    traced = original(concrete)
    renamed: dict[str, str] = {}
    owned = []
    for body in module.reachable():
        for node in body.graph.node:
            for ref in ops.function_refs(node):
                if ref.name in renamed:
                    ref.name = renamed[ref.name]
                    body.changed = True
        if body.changed:
            new = f"{body.name}_caramel_{next(_unique)}"
            owner.add_function_def(_to_function_def(body, new))
            renamed[body.name] = new
            if body is not module.root:
                owned.append(_Owned(new))
    if module.root.name not in renamed:
        return traced
    made = _in_place_of(traced, renamed[module.root.name], _Rewritten, concrete.graph)
    made.owned = owned
    return made


class Flush:
    """A function of resources alone that returns one constant, registered as long as this lives.

    body: its arguments are a subset of those that it was made from; positions: which of `concrete`'s captured inputs.
    """

    def __init__(self, concrete: Any, body: Body, positions: list[int]) -> None:
        name = f"{body.name}_caramel_{next(_unique)}"
        context.context().add_function_def(_to_function_def(body, name))
        self._owned, self._name = _Owned(name), name
        captured = list(concrete.captured_inputs)
        self._handles = [captured[k] for k in positions]

    def __call__(self) -> None:
        with tf_ops.init_scope():
            context.context().call_function(self._name.encode(), self._handles, 1)


def dataset_ops(dataset: Any) -> set[str] | None:
    """The kinds of all ops in the functions of a tf.data.Dataset and of those that it is made of; None if unknown."""
    found: set[str] = set()
    waiting = [dataset]
    try:
        while waiting:
            one = waiting.pop()
            waiting += one._inputs()
            for wrapped in one._functions():
                for fdef in function_defs(wrapped.function.name).values():
                    found.update(node.op for node in fdef.node_def)
    except AttributeError:
        return None
    return found


class HostVariable:
    """An int64 on the host that functions write by name and Python reads. A new one has the value `initial`."""

    def __init__(self, name: str, initial: int) -> None:
        with tf_ops.init_scope(), tf.device("/device:CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=tf.TensorShape(None), shared_name=name, container=""
            )
            if not tf.raw_ops.VarIsInitializedOp(resource=self._handle):
                tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(initial, tf.int64))

    def value(self) -> int:
        with tf_ops.init_scope():
            return int(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64))


def captured_position(concrete: Any, module: Module, arg: str) -> int | None:
    """Which of the captured inputs an argument of the root is; None if it is given by the caller."""
    before = len(module.root.args) - len(concrete.captured_inputs)
    k = module.root.args.index(arg) - before
    return k if k >= 0 else None


def dispatch(concrete: Any, arm: Any, around: Callable[[Dispatch, tuple[Any, ...]], Any]) -> Dispatch:
    """From now on calls of `concrete` go through `around`; `restore` undoes it."""
    traced = original(concrete)
    made: Dispatch = _in_place_of(traced, traced.name, Dispatch, concrete.graph)
    made.arm, made.around = arm, around
    swap(concrete, made)
    return made


def _in_place_of(traced: Any, name: Any, kind: Any, graph: Any) -> Any:
    return kind(
        name,
        context.context(),
        traced.function_type,
        [*traced.children, traced],
        traced.call_options,
        cached_graph=graph,
    )


def swap(concrete: Any, made: Any) -> None:
    """Makes `concrete` run what `build` or `dispatch` made; `restore` undoes it."""
    concrete._caramel_original = original(concrete)
    _install(concrete, made)


def restore(concrete: Any) -> None:
    """Back to the function that TensorFlow traced."""
    if hasattr(concrete, "_caramel_original"):
        _install(concrete, concrete._caramel_original)
        del concrete._caramel_original


def _install(concrete: Any, atomic: Any) -> None:
    concrete._inference_function = atomic
    concrete._delayed_rewrite_functions._inference_function = atomic


def deterministic() -> bool:
    """Has the user called tf.config.experimental.enable_op_determinism()?"""
    return bool(config.is_op_determinism_enabled())


class Tracing:
    """TensorFlow's tracer, in memory, for the time between start() and stop()."""

    def __init__(self) -> None:
        from tensorflow.python.profiler.internal import _pywrap_profiler

        self._session = _pywrap_profiler.ProfilerSession()

    def start(self) -> None:
        """Raises if another tracer runs already: there can be one only."""
        # Level 2 leaves out ops below some 8,000 cycles on 2.15. 2.21 drops these numbers and always takes level 2,
        # which there covers every op.
        self._session.start("", {"host_tracer_level": 2, "python_tracer_level": 0, "device_tracer_level": 0})

    def stop(self) -> bytes:
        return bytes(self._session.stop())


def events(trace: bytes) -> tuple[list[tuple[str, float, float]], dict[str, list[tuple[float, float]]]]:
    """Of what Tracing.stop() gave: [(node, start, end)] of the kernels that ran, and for each asynchronous one
    its [(start, done)]: handed over, and called back. In seconds of the tracer's clock.
    """
    from tensorflow.tsl.profiler.protobuf import trace_events_pb2

    kernels = []
    marks: dict[str, dict[str, list[float]]] = {}
    for event in trace_events_pb2.Trace.FromString(trace).trace_events:
        at = event.timestamp_ps / 1e12
        if event.name.startswith("ExecutorState::ProcessAsync::"):
            kinds = marks.setdefault(event.args["name"], {"Start": [], "Done": []})
            kinds[event.name.rpartition("::")[2]].append(at)
        elif "long_name" in event.args:
            node, _, op = event.args["long_name"].rpartition(":")
            if op == event.name:
                kernels.append((node, at, at + event.duration_ps / 1e12))
    spans = {
        node: list(zip(sorted(kinds["Start"]), sorted(kinds["Done"]), strict=False)) for node, kinds in marks.items()
    }
    return kernels, spans


def self_test() -> str | None:
    """Rewrites a small function and runs it. None if all is well, else one line that says what is not."""
    with tf_ops.init_scope():  # it may be called while something else is being traced
        return _self_test()


def _self_test() -> str | None:
    seen: list[Any] = []

    def on_function(concrete: Any) -> None:
        seen.append(concrete)

    def on_graph(graph: Any) -> None:
        seen.append(graph)

    try:
        add_hooks(on_graph, on_function)
        try:
            one = tf.constant(1.0)
            concrete = tf.function(lambda x: x * 2.0 + 1.0).get_concrete_function(one)
        finally:
            remove_hooks(on_graph, on_function)
        if len(seen) != 2 or seen[1] is not concrete:
            return f"the hooks saw {len(seen)} events instead of 2"
        module = to_module(function_defs(function_name(concrete)))
        body = module.root
        constants = [n for n in body.graph.node if n.op == "Const" and list(n.attr["value"].tensor.float_val) == [2.0]]
        if len(constants) != 1:
            return "the traced function does not look as expected"
        constants[0].attr["value"].tensor.float_val[0] = 3.0
        body.changed = True
        swap(concrete, build(concrete, module))
        after = float(concrete(one))
        restore(concrete)
        before = float(concrete(one))
        if (after, before) != (4.0, 3.0):
            return f"a rewritten function gave {after} and the restored one {before}, not 4.0 and 3.0"
    except Exception as error:  # whatever changed in TensorFlow, the answer is to leave it alone
        return f"{type(error).__name__}: {error}"
    return None
