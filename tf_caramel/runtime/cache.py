"""The cache of profiles, plans and records: one folder a step, by the key of its graph and its set-up."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from tf_caramel.planner.plan import Plan
from tf_caramel.planner.profile import InputError, Profile
from tf_caramel.planner.record import Record

log = logging.getLogger("tf_caramel")


@dataclass(frozen=True)
class Cache:
    """folder: None keeps nothing."""

    folder: str | None

    def entry(self, key: str) -> Path | None:
        return Path(self.folder, key) if self.folder else None

    def load(self, key: str) -> tuple[Plan | None, Record] | None:
        """(plan, record); the plan is None if the function as traced was the fastest. None if nothing is kept.
        Raises InputError naming the file and the field."""
        entry = self.entry(key)
        if entry is None or not (entry / "record.json").exists():
            return None
        try:
            record = Record.from_json((entry / "record.json").read_text(), str(entry / "record.json"))
            if record.key != key:
                raise InputError(f"{entry / 'record.json'}: key: {record.key!r} is of another step than {key!r}")
            if record.chosen == "traced":
                return None, record
            return Plan.from_json((entry / "plan.json").read_text(), str(entry / "plan.json")), record
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{entry}: {error}") from error

    def save(self, key: str, profile: Profile | None, plan: Plan | None, record: Record) -> None:
        """Each file appears whole or not at all. A folder that cannot be written is no reason to stop: a warning."""
        entry = self.entry(key)
        if entry is None:
            return
        texts = {"profile.json": profile and profile.to_json(), "plan.json": plan and plan.to_json()}
        texts["record.json"] = record.to_json()  # last: whoever finds it finds the others
        try:
            entry.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                if text is not None:
                    part = entry / f".{name}.{os.getpid()}"
                    part.write_text(text)
                    part.replace(entry / name)
        except OSError as error:
            log.warning("tf_caramel: what was measured is not kept in %s: %s", entry, error)
