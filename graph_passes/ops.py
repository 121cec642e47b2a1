"""Tables of op kinds: what a node is, told from its op name and attributes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
IFS = frozenset({"If", "StatelessIf"})
WHILES = frozenset({"While", "StatelessWhile"})
LOOP_BACK_EDGES = frozenset({"NextIteration", "RefNextIteration"})
PASS_THROUGH = frozenset({"Identity", "Cast", "Reshape", "StopGradient"})

READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
READS_ONLY = READS | {"VariableShape", "VarIsInitializedOp"}  # what touches a variable and leaves it as it is
# Legacy random ops: the kernel keeps the state, and a function that is built anew has new kernels.
RANDOM = frozenset(
    {
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "ParameterizedTruncatedNormal",
        "RandomGamma", "RandomPoissonV2", "RandomShuffle", "Multinomial",
    }
)  # fmt: skip
# What must run where and when it was traced: it has effects or sources that a graph does not show.
IMMOVABLE = RANDOM | {
    "EagerPyFunc", "PyFunc", "PyFuncStateless", "PrintV2", "Print", "IteratorGetNext", "IteratorGetNextSync",
    "IteratorGetNextAsOptional", "StatefulUniform", "StatefulStandardNormalV2", "StatefulTruncatedNormal",
    "StatefulUniformInt", "StatefulUniformFullInt", "RngReadAndSkip", "RngSkip", "Switch", "RefSwitch", "Merge",
    "Enter", "Exit", "NextIteration", "LoopCond",
}  # fmt: skip
# Ops that may be made to wait for others: TensorFlow's remapper and oneDNN's layout pass leave a node with control
# edges alone, so that an edge into a fusable op loses the fusion; these are fused with nothing on CPU (test_gates.py).
GATES = frozenset(
    {
        "Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropFilter", "DepthwiseConv2dNativeBackpropInput", "EluGrad",
        "FusedBatchNormGradV3", "MaxPoolGrad", "Relu6Grad", "ReluGrad", "SigmoidGrad", "TanhGrad",
    }
)  # fmt: skip
# These are fused, but only into a reader that adds or multiplies (forward), never in the backward pass.
GATES_UNLESS_READ_BY = {
    "MatMul": frozenset({"Add", "AddV2", "BiasAdd", "BiasAddGrad", "Mul", "Maximum"}),
    "BatchMatMulV2": frozenset({"Add", "AddV2", "BiasAdd", "Mul", "Maximum"}),
}

ALLREDUCE = "HorovodAllreduce"
GROUPED_ALLREDUCE = "HorovodGroupedAllreduce"
GROUPED = frozenset({GROUPED_ALLREDUCE, "HorovodGroupedAllgather", "HorovodGroupedReducescatter"})
# Collectives the passes name and order. The rest of Horovod's ops (broadcast, join, ...) are left where they are.
COLLECTIVES = frozenset(
    {
        ALLREDUCE,
        GROUPED_ALLREDUCE,
        "HorovodAllgather",
        "HorovodGroupedAllgather",
        "HorovodReducescatter",
        "HorovodGroupedReducescatter",
    }
)
# What must be equal for gradients to share one message (besides the dtype and the device).
MESSAGE_ATTRS = ("reduce_op", "prescale_factor", "postscale_factor", "process_set_id")

DT_INT32, DT_INT64, DT_BOOL = 3, 9, 10
# Ops whose results an optimizer may take from the step, by the attribute that holds their dtype.
BOOLEAN = frozenset(
    {
        "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot",
        "IsFinite", "IsNan", "IsInf", "All", "Any",
    }
)  # fmt: skip
OUTPUT_DTYPE = dict.fromkeys(
    (
        "Identity",
        "Add",
        "AddV2",
        "AddN",
        "Sub",
        "Mul",
        "MulNoNan",
        "RealDiv",
        "Div",
        "DivNoNan",
        "FloorDiv",
        "FloorMod",
        "Mod",
        "Pow",
        "Sqrt",
        "Rsqrt",
        "Square",
        "SquaredDifference",
        "Exp",
        "Log",
        "Log1p",
        "Abs",
        "Neg",
        "Sign",
        "Reciprocal",
        "Minimum",
        "Maximum",
        "Sum",
        "Mean",
        "Max",
        "Min",
        "Prod",
        "L2Loss",
        "Select",
        "SelectV2",
        "Reshape",
        "Squeeze",
        "ExpandDims",
        "BroadcastTo",
        "Tile",
        "Fill",
        "Pack",
        "ConcatV2",
        "Slice",
        "StridedSlice",
        "ZerosLike",
        "OnesLike",
        "StopGradient",
        "Cos",
        "Sin",
        "Tanh",
        "Sigmoid",
        "Round",
        "Floor",
        "Ceil",
        "MatMul",
        "Transpose",
        "ClipByValue",
        "HorovodAllreduce",
        "HorovodGroupedAllreduce",
    ),
    "T",
) | {"Cast": "DstT", "Const": "dtype", "ReadVariableOp": "dtype", "Placeholder": "dtype", "GatherV2": "Tparams",
     "Range": "Tidx"}  # fmt: skip
OUTPUT_DTYPE |= dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase", *sorted(CALLS)), "Tout")
DT_RESOURCE = 20
# Bytes of one element, by the number of tensorflow.DataType.
DTYPE_BYTES = {1: 4, 2: 8, 3: 4, 4: 1, 5: 2, 6: 1, 9: 8, 10: 1, 14: 2, 17: 2, 19: 2, 22: 4, 23: 8}
DTYPE_NAMES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 19: "float16", 22: "uint32", 23: "uint64",
}  # fmt: skip

SHAPE_ATTR = "_caramel_shapes"  # shapes of a collective's inputs, written while the function is traced
SCALAR_ATTR = "_caramel_scalar"  # on a node whose outputs are scalars, written then too
BATCH_ATTR = "_caramel_batch"  # on collectives that carry a plan's name: a second rewrite leaves them alone
PROBE = "tf_caramel_probe"  # in the names of collectives that measure the network: no step, never rewritten
XLA_ATTR = "_XlaMustCompile"


def is_collective(node: Any) -> bool:
    return node.op in COLLECTIVES


def is_update(node: Any) -> bool:
    """Does it write a variable?"""
    op: str = node.op
    return op.startswith(("ResourceApply", "ResourceSparseApply", "ResourceScatter")) or (
        op.startswith("Assign") and op.endswith("VariableOp")
    )


def is_call(node: Any) -> bool:
    """Does it run other functions?"""
    return next(function_refs(node), None) is not None


def output_dtype(node: Any) -> int | None:
    """The number of the dtype of an op's only or first output; None where this table does not tell."""
    if node.op in BOOLEAN:
        return DT_BOOL
    key = OUTPUT_DTYPE.get(node.op)
    if key is None or key not in node.attr:
        return None
    attr = node.attr[key]
    return int(attr.list.type[0] if attr.WhichOneof("value") == "list" else attr.type)


def is_xla(attrs: Any) -> bool:
    """Keras 3 writes the attribute with the value False everywhere: only True means compiled."""
    return XLA_ATTR in attrs and attrs[XLA_ATTR].b


def function_refs(node: Any) -> Iterator[Any]:
    """Every NameAttrList of a node, in sorted attribute order."""
    holders = [(key, attr) for key, attr in node.attr.items() if attr.WhichOneof("value") in ("func", "list")]
    for _, attr in sorted(holders, key=lambda item: item[0]):
        for func in [attr.func] if attr.WhichOneof("value") == "func" else attr.list.func:
            if func.name:
                yield func
