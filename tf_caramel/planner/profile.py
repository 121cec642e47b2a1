"""The profile: what was measured of one step function on all ranks, merged. Plain data, JSON, no TensorFlow import.

A profile is a graph of ops in topological order with a time for each, the transfers among them, and a model of the
network. Everything the planner and the simulator decide, they decide from this.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FORMAT = "tf_caramel profile 1"


class InputError(ValueError):
    """A profile or a plan cannot be used; the text names the file, the field and what is wrong with it."""


@dataclass(frozen=True)
class Op:
    """One op of the step.

    seconds: its share of the wall clock: an instant in which n ops run counts 1/n for each of them.
    inputs: positions of the ops it waits for (data and control), all before its own.
    start: when it was seen to start, seconds from the beginning of the step; orders what is ready at once.
    gate: it may be made to wait for another op without losing one of TensorFlow's fusions.
    """

    name: str
    seconds: float = 0.0
    inputs: tuple[int, ...] = ()
    start: float = 0.0
    gate: bool = False


@dataclass(frozen=True)
class Transfer:
    """One gradient's (or sparse gradient's part's) way through the network.

    op: position of its collective, an op of 0 seconds: the transfer can start when the inputs of that op are done, and
    whoever has it among its inputs waits for the transfer.  kind: transfers may share a message only if their kinds are
    equal; None: it always travels alone and whole.  readers: positions of the ops that read its parameter.
    deferrable: it and its updates may run in the next step instead.
    """

    name: str
    bytes_: int
    op: int
    kind: str | None = "float32"
    readers: tuple[int, ...] = ()
    deferrable: bool = False


@dataclass(frozen=True)
class Network:
    """Time of an all-reduce of n bytes: start_up_seconds + seconds_per_byte * n (a + b*n), fitted to samples.

    queued_seconds: takes the place of a for a message that was handed over while another was still travelling.
    cpu_seconds_per_byte, cpu_seconds_per_message: of a rank's own cores, spent meanwhile.
    stretch: how many times longer a message takes at least while the rank computes (1: computing does not slow it).
    busy_start_up_seconds: what is added to a while the forward and backward pass is not over.
    copy_seconds_per_byte: of one copy in memory (cutting a gradient into chunks and joining them).
    ranks: how many took part.  samples: the measured (bytes, seconds).
    """

    start_up_seconds: float
    seconds_per_byte: float
    queued_seconds: float | None = None
    cpu_seconds_per_message: float = 0.0
    cpu_seconds_per_byte: float = 0.0
    copy_seconds_per_byte: float = 0.0
    stretch: float = 1.0
    busy_start_up_seconds: float = 0.0
    ranks: int = 2
    samples: tuple[tuple[int, float], ...] = ()

    def beside(self, occupied: float) -> Network:
        """The network beside computing that takes the cores so far: 1 is what was measured, with all of them computing;
        0 is an accelerator that does it, where messages and computing do not hold each other up.
        """
        return replace(
            self,
            cpu_seconds_per_message=self.cpu_seconds_per_message * occupied,
            cpu_seconds_per_byte=self.cpu_seconds_per_byte * occupied,
            stretch=1 + (self.stretch - 1) * occupied,
            busy_start_up_seconds=self.busy_start_up_seconds * occupied,
        )

    def seconds(self, bytes_: float, queued: bool = False) -> float:
        start_up = self.queued_seconds if queued and self.queued_seconds is not None else self.start_up_seconds
        return start_up + self.seconds_per_byte * bytes_

    def cpu_seconds(self, bytes_: float) -> float:
        return self.cpu_seconds_per_message + self.cpu_seconds_per_byte * bytes_

    def residuals(self) -> tuple[float, ...]:
        """Of each sample: measured / fitted - 1; infinite where the fit says that it takes no time."""
        fitted = [self.seconds(bytes_) for bytes_, _ in self.samples]
        return tuple(s / f - 1 if f else math.inf for (_, s), f in zip(self.samples, fitted, strict=True))


@dataclass(frozen=True)
class Profile:
    """key: of the graph and the set-up.  cores: that one rank computes on.
    speeds: of each rank, its compute time over the profile's (1.0: as the profile says).
    tied: as TensorFlow traced the step, whoever waits for one transfer waits for all of them.
    deferred: names of the transfers that with their updates are those of the step before (`defer.retime`).
    """

    key: str
    ops: tuple[Op, ...]
    transfers: tuple[Transfer, ...]
    network: Network
    cores: float = 1.0
    speeds: tuple[float, ...] = field(default=(1.0, 1.0))
    tied: bool = False
    deferred: tuple[str, ...] = ()

    @property
    def compute_seconds(self) -> float:
        return math.fsum(op.seconds for op in self.ops)

    @property
    def bytes_(self) -> int:
        return sum(t.bytes_ for t in self.transfers)

    def to_json(self) -> str:
        names = [op.name for op in self.ops]
        network = vars(self.network) | {"samples": [list(s) for s in self.network.samples]}
        data = {
            "format": FORMAT,
            "key": self.key,
            "cores": self.cores,
            "speeds": list(self.speeds),
            "tied": self.tied,
            "network": network,
            "ops": [
                {"name": o.name, "seconds": o.seconds, "inputs": [names[i] for i in o.inputs], "start": o.start}
                | ({"gate": True} if o.gate else {})
                for o in self.ops
            ],
            "transfers": [
                {"name": t.name, "bytes": t.bytes_, "op": names[t.op], "kind": t.kind}
                | ({"readers": [names[i] for i in t.readers]} if t.readers else {})
                | ({"deferrable": True} if t.deferrable else {})
                for t in self.transfers
            ],
        } | ({"deferred": list(self.deferred)} if self.deferred else {})
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Reads what `to_json` wrote, in any order of its ops. Raises InputError naming `source` and the field."""
        data = Reader.parse(text, source, FORMAT)
        ops = [
            (o.text("name"), o.seconds("seconds"), o.texts("inputs"), o.seconds("start", 0.0), o.flag("gate"))
            for o in data.items("ops")
        ]
        transfers = [
            (t.text("name"), t.count("bytes"), t.text("op"), t.text("kind", None), t.texts("readers", ()))
            for t in data.items("transfers")
        ]
        deferrable = {t.text("name") for t in data.items("transfers") if t.flag("deferrable")}
        deferred = data.texts("deferred", ())
        network = data.item("network")
        samples = network.value.get("samples", [])
        if not isinstance(samples, list) or not all(
            isinstance(s, list) and len(s) == 2 and all(_is_number(x) and x >= 0 for x in s) for s in samples
        ):
            raise network.error("samples", samples, "a list of [bytes, seconds]")
        fitted = Network(
            start_up_seconds=network.seconds("start_up_seconds"),
            seconds_per_byte=network.seconds("seconds_per_byte"),
            queued_seconds=network.seconds("queued_seconds", None),
            cpu_seconds_per_message=network.seconds("cpu_seconds_per_message", 0.0),
            cpu_seconds_per_byte=network.seconds("cpu_seconds_per_byte", 0.0),
            copy_seconds_per_byte=network.seconds("copy_seconds_per_byte", 0.0),
            stretch=network.seconds("stretch", 1.0),
            busy_start_up_seconds=network.seconds("busy_start_up_seconds", 0.0),
            ranks=network.count("ranks", 2),
            samples=tuple((int(b), float(s)) for b, s in samples),
        )
        if fitted.stretch < 1:
            raise network.error("stretch", fitted.stretch, "1 or more")
        speeds = data.value.get("speeds", [1.0] * fitted.ranks)
        if not isinstance(speeds, list) or not speeds or not all(_is_number(s) and s > 0 for s in speeds):
            raise data.error("speeds", speeds, "a list of numbers above 0")
        cores = data.seconds("cores", 1.0)
        if not cores:
            raise data.error("cores", cores, "a number above 0")
        speeds = tuple(map(float, speeds))
        given = cls.make(data.text("key"), ops, transfers, fitted, cores, speeds, source, deferrable)
        if unknown := sorted(set(deferred) - {t.name for t in given.transfers}):
            raise data.error("deferred", unknown[0], "a transfer")
        return replace(given, tied=data.flag("tied"), deferred=tuple(deferred))

    @classmethod
    def make(
        cls,
        key: str,
        ops: Iterable[tuple[str, float, Sequence[str], float, bool]],
        transfers: Iterable[tuple[str, int, str, str | None, Sequence[str]]],
        network: Network,
        cores: float = 1.0,
        speeds: tuple[float, ...] = (1.0, 1.0),
        source: str = "profile",
        deferrable: Collection[str] = (),
    ) -> Profile:
        """From ops (name, seconds, names of inputs, start, gate) and transfers (name, bytes, name of the collective,
        kind, names of readers) in any order: the profile does not depend on it.  deferrable: names of transfers.
        Raises InputError."""
        given = {}
        for op in ops:
            if op[0] in given:
                raise InputError(f"{source}: two ops are called {op[0]!r}")
            given[op[0]] = op
        for name, _, inputs, _, _ in given.values():
            for i in inputs:
                if i not in given:
                    raise InputError(f"{source}: op {name!r} waits for {i!r}, which is missing")
        place = {name: k for k, name in enumerate(_order(given, source))}
        sorted_ops = tuple(
            Op(name, seconds, tuple(sorted({place[i] for i in inputs})), start, gate)
            for name, seconds, inputs, start, gate in (given[n] for n in place)
        )
        made: list[Transfer] = []
        for name, bytes_, op_name, kind, readers in transfers:
            for n in (op_name, *readers):
                if n not in place:
                    raise InputError(f"{source}: transfer {name!r} names the op {n!r}, which is missing")
            reading = tuple(sorted({place[r] for r in readers}))
            made.append(Transfer(name, bytes_, place[op_name], kind, reading, name in deferrable))
        if unknown := sorted(set(deferrable) - {t.name for t in made}):
            raise InputError(f"{source}: {unknown[0]!r} is called deferrable, but it is no transfer")
        made.sort(key=lambda t: (t.op, t.name))
        for what, values in (("name", [t.name for t in made]), ("op", [t.op for t in made])):
            if len(set(values)) < len(values):
                raise InputError(f"{source}: two transfers have the same {what}")
        return cls(key, sorted_ops, tuple(made), network, cores, speeds)


def _order(given: Mapping[str, tuple[str, float, Sequence[str], float, bool]], source: str) -> list[str]:
    """Topological order; of what is possible the op seen to start first comes first, then by name."""
    waiting = {name: len(set(op[2])) for name, op in given.items()}
    consumers: dict[str, list[str]] = {name: [] for name in given}
    for name, op in given.items():
        for i in set(op[2]):
            consumers[i].append(name)
    ready = [(op[3], name) for name, op in given.items() if not waiting[name]]
    heapq.heapify(ready)
    result = []
    while ready:
        _, name = heapq.heappop(ready)
        result.append(name)
        for consumer in consumers[name]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heapq.heappush(ready, (given[consumer][3], consumer))
    if len(result) < len(given):
        stuck = sorted(set(given) - set(result))
        raise InputError(f"{source}: the ops wait for each other in a circle: {', '.join(stuck[:5])}")
    return result


def _is_number(value: Any) -> bool:
    # Not math.isfinite: a whole number may be too large for it.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


_MISSING: Any = object()


@dataclass(frozen=True)
class Reader:
    """One JSON object of a file, whose fields are read with checks; `path` says where it stands in the file."""

    value: Mapping[str, Any]
    source: str
    path: str = ""

    @classmethod
    def parse(cls, text: str, source: str, format_: str) -> Reader:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{source}: cut off or not JSON (line {error.lineno}: {error.msg})") from error
        if not isinstance(data, dict) or data.get("format") != format_:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"{source}: format: {found!r} is not {format_!r}")
        return cls(data, source)

    def error(self, name: str, value: Any, wanted: str) -> InputError:
        shown = "missing" if value is _MISSING else f"{value!r:.60}"
        label = f" ({self.value['name']!r})" if self.path and isinstance(self.value.get("name"), str) else ""
        return InputError(f"{self.source}: {self.path}{name}{label}: {shown}, but it must be {wanted}")

    def _get(self, name: str, default: Any) -> tuple[Any, bool]:
        value = self.value.get(name, _MISSING)
        return (default, True) if value is _MISSING and default is not _MISSING else (value, False)

    def seconds(self, name: str, default: Any = _MISSING) -> Any:
        value, absent = self._get(name, default)
        if absent or (value is None and default is None):
            return value
        if not _is_number(value) or value < 0:
            raise self.error(name, value, "a number, 0 or more")
        return float(value)

    def count(self, name: str, default: Any = _MISSING) -> int:
        value, absent = self._get(name, default)
        if not absent and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise self.error(name, value, "a whole number, 0 or more")
        return int(value)

    def text(self, name: str, default: Any = _MISSING) -> Any:
        value, absent = self._get(name, default)
        if not absent and not isinstance(value, str) and not (value is None and default is None):
            raise self.error(name, value, "text")
        return value

    def texts(self, name: str, default: Any = _MISSING) -> Sequence[str]:
        value, absent = self._get(name, default)
        if not absent and (not isinstance(value, list) or not all(isinstance(x, str) for x in value)):
            raise self.error(name, value, "a list of names")
        return tuple(value)

    def flag(self, name: str) -> bool:
        value, _ = self._get(name, False)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def item(self, name: str) -> Reader:
        value, _ = self._get(name, _MISSING)
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Reader(value, self.source, f"{self.path}{name}.")

    def items(self, name: str) -> list[Reader]:
        value, _ = self._get(name, _MISSING)
        if not isinstance(value, list) or not all(isinstance(x, dict) for x in value):
            raise self.error(name, value, "a list of objects")
        return [Reader(x, self.source, f"{self.path}{name}[{k}].") for k, x in enumerate(value)]
