"""Random small steps and plans that can be carried out, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tf_caramel.planner.plan import BodyPlan, Piece
from tf_caramel.planner.profile import Network, Op, Profile, Transfer

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other work may slow the machine

# Whole eighths make ties, which is where orders go wrong.
EIGHTHS = st.integers(0, 16).map(lambda n: n / 8)


@st.composite
def networks(draw: st.DrawFn, cpu: bool = True) -> Network:
    return Network(
        start_up_seconds=draw(EIGHTHS),
        seconds_per_byte=draw(EIGHTHS),
        queued_seconds=draw(st.none() | EIGHTHS),
        cpu_seconds_per_message=draw(EIGHTHS) if cpu else 0.0,
        cpu_seconds_per_byte=draw(EIGHTHS) if cpu else 0.0,
        copy_seconds_per_byte=draw(EIGHTHS),
    )


@st.composite
def profiles(draw: st.DrawFn, cpu: bool = True, speeds: Sequence[float] = (1.0,), kinds: str = "ab-") -> Profile:
    """Ops that wait for any ops before them; some of those without time are collectives. Kind "-": travels alone."""
    ops: list[Op] = []
    transfers: list[Transfer] = []
    for k in range(draw(st.integers(1, 12))):
        inputs = draw(st.sets(st.integers(0, k - 1), max_size=3)) if k else set()
        seconds = draw(EIGHTHS)
        if draw(st.booleans()):
            seconds = 0.0
            kind = draw(st.sampled_from(kinds))
            transfers.append(Transfer(f"g{k}", draw(st.integers(0, 8)), k, None if kind == "-" else kind))
        ops.append(Op(f"x{k}", seconds, tuple(sorted(inputs)), start=float(k)))
    return Profile(
        "key",
        tuple(ops),
        tuple(transfers),
        draw(networks(cpu)),
        cores=draw(st.sampled_from([1.0, 2.0, 3.5])),
        speeds=tuple(draw(st.lists(st.sampled_from(speeds), min_size=1, max_size=2))),
    )


@st.composite
def plans(draw: st.DrawFn, profile: Profile, chunks: bool = True, backwards: bool = True) -> BodyPlan:
    """Any edges without a circle, any order of batches in which none waits for one behind it, any window."""
    inputs = [set(op.inputs) for op in profile.ops]
    edges = []
    op = st.integers(0, len(inputs) - 1)
    for a, b in draw(st.lists(st.tuples(op, op), max_size=4)):
        if (a < b or backwards) and b not in ancestors(inputs, a):
            inputs[b].add(a)
            edges.append((profile.ops[a].name, profile.ops[b].name))
    before = {t.name: ancestors(inputs, t.op) - {t.op} for t in profile.transfers}
    left = draw(st.permutations(profile.transfers))
    batches: list[list[Piece]] = []
    inside: list[Transfer] = []  # whose pieces are in the last batch
    while left:
        nxt = next(t for t in left if not any(other.op in before[t.name] for other in left))
        left.remove(nxt)
        parts = draw(st.integers(1, 3)) if chunks and nxt.kind is not None else 1
        for part in range(parts):
            fits = all(t.kind == nxt.kind is not None and t.op not in before[nxt.name] for t in inside)
            if not inside or not fits or draw(st.booleans()):
                batches.append([])
                inside = []
            batches[-1].append(Piece(nxt.name, part, parts))
            inside.append(nxt)
    return BodyPlan(tuple(map(tuple, batches)), draw(st.integers(0, 3)), tuple(edges))


def ancestors(inputs: Sequence[set[int]], op: int) -> set[int]:
    """The op and all that it waits for."""
    found = {op}
    todo = [op]
    while todo:
        new = inputs[todo.pop()] - found
        found |= new
        todo += new
    return found
