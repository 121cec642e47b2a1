"""Profiles made up for tests: a few lines each, nothing drawn by chance, close to what a traced step looks like."""

from __future__ import annotations

from collections.abc import Sequence

from tf_caramel.planner.profile import Network, Profile

MS = 1e-3
GIGABIT = Network(  # two ranks on 1 Gbit/s with Gloo, rounded from measurements
    start_up_seconds=2.4 * MS,
    seconds_per_byte=9.3e-9,
    queued_seconds=1.0 * MS,
    cpu_seconds_per_message=0.4 * MS,
    cpu_seconds_per_byte=0.5e-9,
    copy_seconds_per_byte=0.25e-9,
    ranks=2,
    samples=((65536, 3.1 * MS), (1048576, 12.0 * MS), (8388608, 80.6 * MS)),
)


def layered(
    layers: Sequence[tuple[float, int, int]],
    network: Network = GIGABIT,
    small_bytes: int = 0,
    cores: float = 1.0,
    speeds: tuple[float, ...] = (1.0, 1.0),
    key: str = "made up",
) -> Profile:
    """A chain of layers: a forward op (and fillers), two backward ops and an update for each, backward from the last.

    layers: (seconds of the forward pass, bytes of the kernel, further ops without a gradient) of each; backward takes
    twice the forward time: half for the activations' gradient, half for the kernel's, which only its collective needs.
    small_bytes: above 0, each layer has a bias of so many bytes as well.
    """
    ops: list[tuple[str, float, list[str], float, bool]] = []
    transfers: list[tuple[str, int, str, str | None, list[str]]] = []
    clock = 0.0

    def op(name: str, seconds: float, *inputs: str, gate: bool = False) -> str:
        nonlocal clock
        ops.append((name, seconds, list(inputs), clock, gate))
        clock += seconds
        return name

    last = op("batch", 0.0)
    for k, (seconds, _, fillers) in enumerate(layers):
        for f in range(fillers):
            last = op(f"layer{k}/activation{f}", seconds / (fillers + 1), last)
        last = op(f"layer{k}/forward", seconds / (fillers + 1), last)
    last = op("loss", 0.1 * MS, last)
    for k, (seconds, bytes_, fillers) in reversed(list(enumerate(layers))):
        into, reader = f"layer{k}/forward", [f"layer{k}/forward"]
        parts = [("kernel", bytes_, op(f"layer{k}/kernel_gradient", seconds, last, into, gate=True))]
        if small_bytes:
            parts.append(("bias", small_bytes, op(f"layer{k}/bias_gradient", 0.02 * MS, last, gate=True)))
        for f in range(fillers):
            last = op(f"layer{k}/activation{f}_gradient", seconds / (fillers + 1), last)
        last = op(f"layer{k}/gradient", seconds / (fillers + 1), last)
        for part, size, gradient in parts:
            collective = op(f"layer{k}/{part}/HorovodAllreduce", 0.0, gradient)
            transfers.append((f"layer{k}/{part}", size, collective, "float32", reader))
            op(f"layer{k}/{part}/update", 1e-10 * size + 5e-6, collective)
    return Profile.make(key, ops, transfers, network, cores, speeds)


def chain(layers: int = 4, seconds: float = 10 * MS, bytes_: int = 1_000_000, **options) -> Profile:
    """Equal layers."""
    return layered([(seconds, bytes_, 0)] * layers, **options)


def resnet_like(blocks: int = 16, seconds: float = 0.3, **options) -> Profile:
    """Small kernels first, large ones last, each convolution of a stage equally slow: about 100 MB."""
    layers = [(0.04, 37_632, 2)]
    for block in range(blocks):
        width = 64 * 2 ** (block * 4 // blocks)
        for kernel in (4 * width * width, 9 * width * width, 4 * width * width):
            layers.append((kernel / (width * width) / 17 / blocks, 4 * kernel, 2))
    layers.append((0.02, 8_192_000, 1))
    whole = sum(share for share, _, _ in layers) * 3
    options = {"small_bytes": 2048, **options}
    return layered([(share * seconds / whole, bytes_, fillers) for share, bytes_, fillers in layers], **options)


def wide(gradients: int = 1000, ops: int = 5000, **options) -> Profile:
    """Very many small layers: of the size of the largest steps that are planned."""
    # A layer with f fillers has forward, kernel gradient, gradient, collective, update and 2 f fillers.
    layers = [(0.3 * MS, 40_000 + 4_000 * (k % 50), 0) for k in range(gradients)]
    extra = max(0, ops - 5 * gradients - 2) // 2
    layers[:extra] = [(s, b, 1) for s, b, _ in layers[:extra]]
    return layered(layers, **options)
