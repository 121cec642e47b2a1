"""From traced calls to a profile: each rank observes its own, one rank merges what all of them saw."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graph_passes.dataflow import Dataflow, dataflow
from tf_caramel.planner.calibrate import hold
from tf_caramel.planner.plan import digest
from tf_caramel.planner.profile import Network, Profile
from tf_caramel.runtime import probe, tf_private, trace

if TYPE_CHECKING:
    from tf_caramel.runtime.step import Collectives, Step
    from tf_caramel.runtime.tuner import Done

OUTSIDE = "(outside the step)"  # the call itself: what comes before the step's first op and after its last
_UNMATCHED = 0.1  # of the kernels' time: more than that and the profile says so
IDLE = 0.6
_DROPPED = ("Const", "Placeholder", "NoOp")


class CannotMergeError(Exception):
    """The ranks' observations do not make one profile; the text says why."""


@dataclass(frozen=True)
class Facts:
    """What is known besides the profile. steps: in a call.  step_seconds: of untraced calls; and of the traced ones."""

    steps: int
    step_seconds: float
    traced_step_seconds: float
    messages: list[tuple[str, int, float, float]]
    unmatched: float
    why: list[str]


def observe(step: Step, calls: list[Done], network: Network) -> dict[str, Any]:
    """What this rank has to show, as plain data."""
    functions = Counter(done.function for done in calls if isinstance(done.trace, bytes))
    if not functions:
        raise CannotMergeError(next((d.trace for d in calls if isinstance(d.trace, str)), "nothing was traced"))
    function = functions.most_common(1)[0][0]
    collectives = function.collectives()
    flow = dataflow(collectives.body)
    names = _kept(collectives, flow)
    known = set(names)
    handed_over = step.messages()
    average = sum(handed_over.values()) / max(1, len(handed_over))
    cores = probe.cores()
    traced = [(d, tf_private.events(d.trace)) for d in calls if d.function is function and isinstance(d.trace, bytes)]

    def times_of(kernels: Any, spans: Any, taken: float) -> trace.StepTimes | None:
        return trace.step_times(kernels, spans, known, {*handed_over, *collectives.keys}, taken)

    first = next((t for _, (kernels, spans) in traced if (t := times_of(kernels, spans, 0.0))), None)
    if first is None:
        raise CannotMergeError("the tracer saw none of the collectives")
    untraced = statistics.median(d.cpu_seconds for d in calls if d.trace is None) / first.steps
    sending = sum(network.cpu_seconds(bytes_) for bytes_ in handed_over.values())
    occupied = _occupied(untraced - sending, sum(first.seconds.values()), cores)
    share = network.cpu_seconds(average) / network.seconds(average)
    taken = occupied * min(share, cores / (cores + 1)) / cores
    seen = [(d, times) for d, (kernels, spans) in traced if (times := times_of(kernels, spans, taken)) is not None]
    merged = trace.merge([times for _, times in seen], occupied)
    outside = statistics.median(max(0.0, d.seconds - t.span_seconds) / t.steps for d, t in seen)
    return {
        "names": names,
        "inputs": [[i for i in flow.inputs[n] if i in known] for n in names],
        "gates": sorted(flow.gates & known),
        "transfers": [
            [name, collectives.bytes_[name] or 0, node, collectives.kinds[name], flow.readers.get(node, [])]
            for name, node in collectives.nodes.items()
        ],
        "seconds": [round(merged.seconds.get(n, 0.0), 8) for n in names],
        "start": [round(merged.start.get(n, 0.0), 8) for n in names],
        "outside": outside,
        "steps": seen[0][1].steps,
        "tied": collectives.tied,
        "undeferrable": dict(collectives.undeferrable),
        "may_defer": step.may_defer(collectives.looped),
        "speed": trace.speed([times for _, times in seen], merged),
        "occupied": occupied,
        "step_seconds": statistics.median(d.seconds for d in calls if d.trace is None) / seen[0][1].steps,
        "traced_step_seconds": statistics.median(d.seconds / t.steps for d, t in seen),
        "messages": [[name, handed_over.get(name, 0), start, done] for name, start, done in merged.messages],
        "alone": _alone(step, [times for _, times in seen], handed_over),
        "unmatched": merged.unmatched,
        "cores": cores,
        "network": vars(network) | {"samples": [list(s) for s in network.samples]},
    }


def _alone(
    step: Step, calls: list[trace.StepTimes], handed_over: dict[str, int]
) -> list[tuple[str, int, float, float]]:
    """(message, bytes, handed over, seconds), medians, if the plan that ran has one message under way at a time."""
    plan = step.plans.get(step.plain)
    if plan is None or any(body.window != 1 for body in plan.bodies):
        return []
    times: dict[str, list[tuple[float, float]]] = {}
    for call in calls:
        for name, start, done in call.messages:
            times.setdefault(name, []).append((start, done - start))
    return [
        (name, handed_over[name], *(statistics.median(column) for column in zip(*times[name], strict=True)))
        for name in sorted(times)
        if name in handed_over
    ]


def _occupied(cpu_seconds: float, seconds: float, cores: float) -> float:
    """How far computing takes the cores, and not an accelerator that they wait for: 0 to 1.

    cpu_seconds: of a step's computing, and of what Horovod does beyond what the probe sees, which can be half as much:
    cores that are busy for IDLE of the time have nothing else to do.  seconds: how long computing takes, messages'
    share of the cores included.
    """
    busy = min(1.0, cpu_seconds / seconds / min(cores, 1.0)) if seconds else 1.0
    return max(0.0, (busy - IDLE) / (1 - IDLE))


def _kept(collectives: Collectives, flow: Dataflow) -> list[str]:
    """The body's ops without those that only hold what is there from the start."""
    kinds = {node.name: node.op for node in collectives.body.graph.node}
    return [name for name, inputs in flow.inputs.items() if inputs or kinds[name] not in _DROPPED]


def merge(key: str, shown: dict[int, Any]) -> tuple[Profile, Facts]:
    """One profile of what all ranks showed. Raises CannotMergeError naming the rank."""
    for rank in sorted(shown):
        if "failed" in shown[rank]:
            raise CannotMergeError(f"rank {rank}: {shown[rank]['failed']}")
    first = min(shown)
    graphs = {rank: digest([shown[rank]["names"], shown[rank]["inputs"]]) for rank in sorted(shown)}
    for rank in sorted(shown):
        if graphs[rank] != graphs[first]:
            raise CannotMergeError(f"ranks {first} and {rank} run different graphs, so their times do not compare")
    rows = [shown[rank] for rank in sorted(shown)]
    lead = rows[0]

    def mean(name: str) -> list[float]:
        return [statistics.fmean(values) for values in zip(*(row[name] for row in rows), strict=True)]

    ops = [
        (name, seconds, inputs or [OUTSIDE], start, name in set(lead["gates"]))
        for name, seconds, inputs, start in zip(
            lead["names"], mean("seconds"), lead["inputs"], mean("start"), strict=True
        )
    ]
    ops.insert(0, (OUTSIDE, statistics.fmean(row["outside"] for row in rows), [], 0.0, False))
    total = sum(op[1] for op in ops)
    speeds = tuple((sum(row["seconds"]) * row["speed"] + row["outside"]) / total if total else 1.0 for row in rows)
    network = probe.merge([_network(row["network"]) for row in rows])
    network = network.beside(statistics.fmean(row["occupied"] for row in rows))
    network = hold(network, _travelled(rows), _passes_end(lead))
    cores = min(row["cores"] for row in rows)
    known = set(lead["names"])
    transfers = [
        (n, b, node, kind, [r for r in readers if r in known]) for n, b, node, kind, readers in lead["transfers"]
    ]
    refused = {name: why for row in reversed(rows) for name, why in row["undeferrable"].items()}
    deferrable = [t[0] for t in transfers if t[0] not in refused]
    profile = Profile.make(
        key, ops, transfers, network, cores, speeds, source="the traced profile", deferrable=deferrable
    )
    why = []
    if refused:
        name = min(refused)
        why.append(f"{len(refused)} of {len(transfers)} gradients are not deferred; {name}: {refused[name]}")
    if max(row["unmatched"] for row in rows) > _UNMATCHED:
        why.append(f"{max(row['unmatched'] for row in rows):.0%} of the traced time belongs to no op of the step")
    return replace(profile, tied=lead["tied"]), Facts(
        lead["steps"],
        statistics.fmean(row["step_seconds"] for row in rows),
        statistics.fmean(row["traced_step_seconds"] for row in rows),
        [(str(n), int(b), float(s), float(d)) for n, b, s, d in lead["messages"]],
        max(row["unmatched"] for row in rows),
        why,
    )


def _travelled(rows: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(bytes, handed over, seconds) of messages, each as the rank saw it that handed it over last."""
    seen: dict[str, list[tuple[float, float, int]]] = {}
    for row in rows:
        for name, bytes_, start, seconds in row["alone"]:
            seen.setdefault(name, []).append((seconds, start, bytes_))
    last = [min(seen[name]) for name in sorted(seen) if len(seen[name]) == len(rows)]
    return [(bytes_, start, seconds) for seconds, start, bytes_ in last]


def _passes_end(row: dict[str, Any]) -> float:
    """When the last op started that a gradient needs, from the beginning of the step."""
    position = {name: k for k, name in enumerate(row["names"])}
    collectives = [position[node] for _, _, node, _, _ in row["transfers"] if node in position]
    return max((row["start"][position[name]] for k in collectives for name in row["inputs"][k]), default=0.0)


def _network(data: dict[str, Any]) -> Network:
    return Network(**(data | {"samples": tuple((int(b), float(s)) for b, s in data["samples"])}))
