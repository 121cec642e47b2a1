"""The report on what a training run left behind: a folder for each step function with profile, plan and record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tf_caramel.planner.decide import STATIC
from tf_caramel.planner.plan import Plan, check
from tf_caramel.planner.profile import InputError, Profile
from tf_caramel.planner.record import Record
from tf_caramel.planner.simulate import Outcome, simulate

FILES = ("profile.json", "plan.json", "record.json")


@dataclass(frozen=True)
class Step:
    """One step function, simulated on its profile: before, as Horovod runs it, and after, by the plan (`origin`).
    ordered: by the plan, not by Horovod."""

    profile: Profile
    origin: str
    before: Outcome
    after: Outcome
    ordered: bool = True

    @classmethod
    def of(cls, profile: Profile, plan: Plan, source: str = "plan") -> Step:
        """Raises InputError if the plan is not one of this profile's body."""
        check(plan, [{t.name: t.kind for t in profile.transfers}], source)
        before, after = (simulate(profile, body, spans=True) for body in (None, plan.bodies[0]))
        return cls(profile, plan.origin, before, after, bool(plan.bodies[0].window))

    @property
    def arm(self) -> str:
        """The record's name for what `after` is."""
        if self.after.deferred_bytes:
            return "deferred" if self.ordered else "loose"
        return STATIC if self.origin == STATIC else "measured"

    @property
    def outcomes(self) -> tuple[tuple[str, Outcome], tuple[str, Outcome]]:
        """What is shown everywhere, with its label."""
        deferred = ", updates in the next step" if self.after.deferred_bytes else ""
        deferred += "" if self.ordered else ", the rest fused by Horovod"
        return ("before: Horovod as it comes", self.before), (f"after: {self.origin}{deferred}", self.after)


@dataclass(frozen=True)
class Entry:
    """What is known of one step function.  step: None if the run ended before there was a profile and a plan."""

    name: str
    step: Step | None
    record: Record | None = None
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """`str()` is the tables; `html` writes one page that needs nothing else, `chrome` a trace for Perfetto."""

    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        from tf_caramel.see import tables

        return tables.text(self.entries)

    def html(self, path: Path) -> None:
        from tf_caramel.see import page

        Path(path).write_text(page.html(self.entries), encoding="utf-8")

    def chrome(self, path: Path) -> None:
        from tf_caramel.see import chrome_trace

        Path(path).write_text(chrome_trace.to_json(self.entries), encoding="utf-8")


def report(folder: Path | str) -> Report:
    """folder: of one step function, or of such folders. Raises InputError if there is nothing, or it cannot be used."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    found = [f for f in (folder, *sorted(folder.iterdir())) if any((f / name).is_file() for name in FILES)]
    if not found:
        raise InputError(f"{folder}: neither it nor a folder in it has a {' or '.join(FILES)}")
    return Report(tuple(map(_entry, found)))


def text_of(file: Path) -> str:
    """Of bytes that are no text, something that is no JSON either: whoever reads it says so."""
    return file.read_text(encoding="utf-8", errors="replace")


def _entry(folder: Path) -> Entry:
    profile_file, plan_file, record_file = (folder / name for name in FILES)
    record = Record.from_json(text_of(record_file), str(record_file)) if record_file.is_file() else None
    entry = Entry(record.function if record else folder.name, None, record, record.why if record else ())
    missing = [file.name for file in (profile_file, plan_file) if not file.is_file()]
    if missing:
        return replace(entry, why=(*entry.why, f"There is no {' and no '.join(missing)}: the run ended before that."))
    profile = Profile.from_json(text_of(profile_file), str(profile_file))
    if record and record.key != profile.key:
        raise InputError(f"{record_file}: key: {record.key!r}, but the profile's is {profile.key!r}: not the same run")
    plan = Plan.from_json(text_of(plan_file), str(plan_file))
    return replace(entry, step=Step.of(profile, plan, str(plan_file)))
