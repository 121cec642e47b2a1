"""DistributedOptimizer: a Keras optimizer whose gradients are reduced over all ranks, once, before it applies them.

The given instance is wrapped in place: its class, state and configuration stay what they are, so it saves and loads as
the plain optimizer. Works on Keras 3, Keras 2 and tf_keras, whoever calls it: `fit`, a custom `train_step`, a loop.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from tf_caramel.planner.plan import first_difference
from tf_caramel.runtime import fitting, hook, ranks, tf_private

# Wrapped optimizers are counted for each process set, so that its members count alike.
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


def DistributedOptimizer(  # noqa: N802  the name users know
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes `optimizer` reduce its gradients over the ranks of `process_set`, and returns that same instance.

    Arguments have Horovod's names, defaults and meaning.
    op: hvd.Average or hvd.Sum.  compression: hvd.Compression.none, .fp16 or another class with `compress` and
    `decompress`; sparse gradients are never compressed.  sparse_as_dense: reduce tf.IndexedSlices as dense tensors
    instead of gathering them.  gradient_predivide_factor: with Average, divides by it before the sum and by
    size/factor after it (sparse gradients are not summed on the way, so it has no effect on them).
    groups: None, a number of groups of equal count, or lists of variables; each group is one grouped all-reduce.
    device_dense, device_sparse: where the collectives are placed.  name: the optimizer keeps its own.

    Raises ValueError or TypeError naming the argument for whatever is not supported; nothing is dropped silently.
    """
    _refuse(optimizer, use_locking, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError(f"op={op!r}: use hvd.Average or hvd.Sum (Keras optimizers can use no other)")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r}: it must be above 0")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    for part in ("compress", "decompress"):
        if not callable(getattr(compression, part, None)):
            raise TypeError(f"compression={compression!r}: it needs a method {part!r}, as hvd.Compression.fp16 has")
    if num_groups < 0 or (num_groups and groups is not None):
        raise ValueError(f"num_groups={num_groups!r}: give either num_groups (deprecated, above 0) or groups")
    reducer = _Reducer(
        number=next(_numbers["global" if process_set is hvd.global_process_set else str(process_set.ranks)]),
        devices=(device_dense, device_sparse),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=float(gradient_predivide_factor),
        groups=_groups(groups if groups is not None else num_groups or None),
        process_set=process_set,
    )
    # Keras 3 funnels everything through `apply`, Keras 2 through `apply_gradients`. Set on the instance, so that its
    # class, and with it every saved file, stays the plain one.
    method = "apply" if hasattr(optimizer, "apply") else "apply_gradients"
    around = _apply if method == "apply" else _apply_gradients
    setattr(optimizer, method, functools.partial(around, reducer, getattr(optimizer, method)))
    if hook.install_if_enabled().enabled:
        fitting.install(optimizer)
    return optimizer


def _refuse(optimizer: Any, use_locking: bool, passes: int, average: bool, scale_local: bool) -> None:
    if any(isinstance(m, functools.partial) and isinstance(m.args[0], _Reducer) for m in _own_methods(optimizer)):
        raise ValueError(f"{optimizer!r} is wrapped already")
    if isinstance(optimizer, type) or not all(hasattr(optimizer, m) for m in ("apply_gradients", "get_config")):
        raise TypeError(
            f"optimizer={optimizer!r} is not an instance of a Keras optimizer (Keras 2, Keras 3 or tf_keras); "
            "tf.compat.v1 optimizers are not supported"
        )
    if hasattr(optimizer, "_allreduce_grads"):
        raise ValueError("optimizer is hvd.DistributedOptimizer's already; give the plain Keras optimizer")
    not_yet = {
        "use_locking": use_locking is not False,
        "backward_passes_per_step": passes != 1,
        "average_aggregated_gradients": average is not False,
        "scale_local_gradients": scale_local is not True,
    }
    for argument, given in not_yet.items():
        if given:
            hint = " (Keras 3 optimizers take gradient_accumulation_steps)" if "passes" in argument else ""
            raise ValueError(f"{argument} is not supported by tf_caramel yet: leave it at its default{hint}")


def _own_methods(optimizer: Any) -> Iterable[Any]:
    return [vars(optimizer)[m] for m in ("apply", "apply_gradients") if m in getattr(optimizer, "__dict__", {})]


def _groups(groups: Any) -> Any:
    """None, a count, or a tuple of tuples of variables. Raises naming what is wrong."""
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups):
        ids = [id(v) for g in groups for v in g]
        if len(set(ids)) < len(ids):
            raise ValueError("groups: a variable is in two groups")
        return tuple(tuple(g) for g in groups)
    raise ValueError(f"groups={groups!r}: use None, a number above 0, or a list of lists of variables")


def _apply(reducer: _Reducer, original: Any, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
    grads = list(grads)
    if trainable_variables is None:
        return original(reducer.reduce(grads, original.__self__._trainable_variables), None, **kwargs)
    variables = list(trainable_variables)
    return original(reducer.reduce(grads, variables), variables, **kwargs)


def _apply_gradients(reducer: _Reducer, original: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
    pairs = list(grads_and_vars)
    # Keras 2's own words for "these gradients are aggregated already".
    if kwargs.get("skip_gradients_aggregation", False) or not kwargs.get("experimental_aggregate_gradients", True):
        _refuse_loss_scale_around()  # which says so too, though nobody has reduced anything
    else:
        pairs = reducer.reduce_pairs(pairs)
    return original(pairs, *args, **kwargs)


class _Reducer:
    """The options of one wrapped optimizer, and the collectives they lead to."""

    def __init__(
        self,
        number: int,
        devices: tuple[str, str],
        compression: Any,
        sparse_as_dense: bool,
        op: Any,
        predivide: float,
        groups: Any,
        process_set: Any,
    ) -> None:
        self.number, self.devices, self.compression = number, devices, compression
        self.sparse_as_dense, self.op, self.groups, self.process_set = sparse_as_dense, op, groups, process_set
        self.predivide = predivide
        self._agreed: set[tuple[Any, ...]] = set()

    def reduce_pairs(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        variables = [v for _, v in pairs]
        return list(zip(self.reduce([g for g, _ in pairs], variables), variables))  # noqa: B905  AutoGraph's has none

    @tf.autograph.experimental.do_not_convert
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients reduced over the ranks, None and order kept. Adds only flat, unconditional collectives."""
        if not hvd.is_initialized():
            raise RuntimeError("call hvd.init() before the first step of an optimizer wrapped by tf_caramel")
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        if not self.process_set.included() or (self.process_set.size() < 2 and not elastic):
            return list(grads)
        if not tf.executing_eagerly():
            _check_graph(tf.compat.v1.get_default_graph())
        if self.sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if not elastic:
            self._agree(grads)
        reduced = list(grads)
        for label, places in self._messages(grads, variables):
            if isinstance(grads[places[0]], tf.IndexedSlices):
                results = [self._gather(grads[places[0]], label)]
            else:
                results = self._allreduce([grads[i] for i in places], label)
            for i, result in zip(places, results, strict=True):
                reduced[i] = result
        return reduced

    def _messages(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[tuple[str, list[int]]]:
        """What goes together: (label, positions of gradients). Groups as asked for, else one each; sparse alone."""
        there = [i for i, g in enumerate(grads) if g is not None]
        dense = [i for i in there if not isinstance(grads[i], tf.IndexedSlices)]
        groups: dict[Any, list[int]] = {}
        if isinstance(self.groups, int):
            for place, i in enumerate(dense):
                groups.setdefault(place * min(self.groups, len(dense)) // len(dense), []).append(i)
        elif self.groups is not None:
            group_of = {id(v): k for k, group in enumerate(self.groups) for v in group}
            unknown = set(group_of) - {id(v) for v in variables}
            if unknown:
                name = next(v.name for group in self.groups for v in group if id(v) in unknown)
                raise ValueError(f"groups: {name} is not among the variables this optimizer updates")
            for i in dense:
                if id(variables[i]) in group_of:
                    groups.setdefault(group_of[id(variables[i])], []).append(i)
        grouped = {i for members in groups.values() for i in members}
        messages = [(str(i), [i]) for i in there if i not in grouped]
        for number, members in sorted(groups.items()):
            for dtype in sorted({grads[i].dtype.name for i in members}):  # a grouped all-reduce has one dtype
                messages.append((f"g{number}_{dtype}", [i for i in members if grads[i].dtype.name == dtype]))
        return messages

    def _allreduce(self, tensors: list[tf.Tensor], label: str) -> list[tf.Tensor]:
        with tf.device(self.devices[0]):
            packed = [self.compression.compress(t) for t in tensors]
            # Horovod has no bfloat16: it travels as float32.
            wire = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t, _ in packed]
            options = {
                "name": f"HorovodAllreduce_caramel_o{self.number}_{label}",
                "op": self.op,
                "prescale_factor": 1.0 / self.predivide,
                "postscale_factor": self.predivide,
                "ignore_name_scope": True,
                "process_set": self.process_set,
            }
            if len(wire) == 1:
                summed = [mpi_ops._allreduce(wire[0], **options)]
            else:
                summed = mpi_ops._grouped_allreduce(wire, **options)
            back = [tf.cast(s, t.dtype) if s.dtype != t.dtype else s for s, (t, _) in zip(summed, packed, strict=True)]
            return [self.compression.decompress(s, ctx) for s, (_, ctx) in zip(back, packed, strict=True)]

    def _gather(self, slices: tf.IndexedSlices, label: str) -> tf.IndexedSlices:
        """Every rank's slices one after the other; the optimizer adds up those with equal indices."""
        with tf.device(self.devices[1]):
            values, indices = (
                mpi_ops.allgather(
                    tensor,
                    name=f"HorovodAllgather_caramel_o{self.number}_{label}_{part}",
                    ignore_name_scope=True,
                    process_set=self.process_set,
                )
                for part, tensor in (("values", slices.values), ("indices", slices.indices))
            )
            if self.op == hvd.Average:
                values = values / tf.cast(self.process_set.size(), values.dtype)
            return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)

    def _agree(self, grads: Sequence[Any]) -> None:
        """Once per kind of gradient list: the same flag, options, versions, shapes and dtypes on every rank."""
        kinds = tuple(_kind(g) for g in grads)
        if kinds in self._agreed:
            return
        loaded = hook.install_if_enabled()  # the flag may have been set since the optimizer was wrapped
        mine = {
            "TF_CARAMEL": int(hook.usable()),
            **loaded.shared(),
            "versions": hook.versions(),
            "settings": {name: os.environ.get(name) for name in (*hook.HOROVOD_SETTINGS, "HOROVOD_FUSION_THRESHOLD")},
            "options": {
                "op": "Average" if self.op == hvd.Average else "Sum",
                "compression": getattr(self.compression, "__name__", type(self.compression).__name__),
                "sparse_as_dense": self.sparse_as_dense,
                "gradient_predivide_factor": self.predivide,
                "groups": [len(g) for g in self.groups] if isinstance(self.groups, tuple) else self.groups,
                "devices": list(self.devices),
            },
            "gradients": list(kinds),
        }
        members = ranks.members([self.process_set.process_set_id])
        ranks.agree(f"optimizer-{self.number}", mine, _judge, members, loaded.timeout_seconds)
        self._agreed.add(kinds)


def _kind(grad: Any) -> str:
    """What ranks must have alike of a gradient, as text: "float32[3,4]", "sparse float32[10,4]", "none"."""
    if grad is None:
        return "none"
    shape = "?" if grad.shape.rank is None else ",".join("?" if d is None else str(d) for d in grad.shape.as_list())
    return f"{'sparse ' if isinstance(grad, tf.IndexedSlices) else ''}{grad.dtype.name}[{shape}]"


def _judge(shown: dict[int, Any]) -> dict[str, Any]:
    leader = min(shown)
    for rank in sorted(shown):
        difference = first_difference(shown[leader], shown[rank])
        if difference:
            return {"error": f"rank {leader} and rank {rank} differ in {difference}"}
    return {}


def _check_graph(graph: Any) -> None:
    if tf_private.in_xla(graph) and os.environ.get("HOROVOD_ENABLE_XLA_OPS") != "1":
        raise ValueError(
            "the training step is being compiled by XLA (jit_compile=True), and Horovod's collectives have no XLA "
            "kernels: pass jit_compile=False to compile() or to tf.function"
        )
    if tf_private.is_branch(graph):
        _refuse_loss_scale_around()


def _refuse_loss_scale_around() -> None:
    if tf_private.on_stack("LossScaleOptimizer"):
        raise ValueError(
            "a LossScaleOptimizer calls the wrapped optimizer only when this rank's gradients are finite, so ranks "
            "would wait for each other: wrap the LossScaleOptimizer itself, "
            "tf_caramel.DistributedOptimizer(LossScaleOptimizer(optimizer))"
        )
