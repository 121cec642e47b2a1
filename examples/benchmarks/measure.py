"""One cell: a model on a ground at a link speed. All arms take turns, A B C A B C, in processes that were there before.

A turn during which others took much of the machine is measured again. What comes out is plain data.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from examples.benchmarks import arms as arms_
from examples.benchmarks.arms import PROGRAMS, Arm
from examples.benchmarks.hosts import Ground
from examples.benchmarks.parties import Party, PartyError

FOREIGN = 0.15  # of the machine's CPU time: more than that taken by others, and a turn is measured again
AGAIN = 2  # at most so many times, and in a cell no more than AGAIN_IN_A_CELL: some machines are never quiet
AGAIN_IN_A_CELL = 20
OURS = ("horovod", "caramel")  # a run without them shows nothing, so it ends if they fail
KEPT = 3  # of plain Horovod's tuned cells, after a quick pass
TUNED = len(arms_.FUSIONS) * len(arms_.CYCLES) * len(arms_.GROUPS)


@dataclass(frozen=True)
class Effort:
    """rounds, steps: of each arm, and at least in each of its turns.
    turn_seconds: an arm's turn lasts about as long at least, from its second one on: short steps differ more from one
    to the next, and cost less.
    cycles: plain Horovod is tuned in its cycle time too; everything: with each fusion threshold, not only the best.
    autotune_seconds: that Horovod may tune itself for in a cell; 0: it is not measured.
    tuning: plain Horovod is tuned, and tunes itself; without, it is measured as it comes.
    within: this project is also measured with several steps in a call, deferring within calls only.
    """

    rounds: int = 3
    steps: int = 3
    turn_seconds: float = 1.0
    cycles: bool = True
    everything: bool = False
    autotune_seconds: float = 30.0
    tuning: bool = True
    within: bool = False


@dataclass
class Bench:
    """The processes of one model on one ground. spec: what all of them are told.  say: shows progress.
    parties: process of arms -> its party; None if it does not work here, and `missing` says why.
    facts: of each process, what it said at its first step.  horovod: its settings now.  again: turns measured again.
    """

    ground: Ground
    spec: dict[str, Any]
    folder: Path
    say: Callable[[str], None] = print
    parties: dict[str, Party | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    horovod: dict[str, dict[str, str]] = field(default_factory=dict)
    again: int = 0

    def launch(self, arms: Sequence[Arm]) -> None:
        """The processes of these arms, one party after the other, each up to its first step."""
        for arm in arms:
            if arm.process not in self.parties:
                self.say(f"starting {arm.process}")
                self.parties[arm.process] = self._launch(arm)

    def _launch(self, arm: Arm) -> Party | None:
        program = PROGRAMS[arm.party]
        if not Path(program.python).exists():
            self.missing[arm.process] = f"{program.python} is not there (make bench installs it)"
            return None
        for party in self.parties.values():
            if party is not None:
                party.rest()
        spec = self.spec | {"steps_per_execution": arm.steps_per_execution}
        if arm.party == "ddp":
            known = self.facts.get(arms_.AS_IT_COMES.process, {})
            spec |= {key: known.get(key) for key in ("layers", "batch")}
        env = dict(program.env) | dict(arm.env)
        party = Party(arm.process, program.module, self.ground, spec, self.folder, env, program.python, program.quiet)
        try:
            answers = party.ask("first")
        except BaseException as error:
            party.close()
            if arm.party in OURS or not isinstance(error, PartyError):
                raise
            self.missing[arm.process] = str(error).splitlines()[0]
            return None
        self.facts[arm.process] = {"first_step_seconds": time.perf_counter() - party.started, **answers[0]}
        return party

    def close(self) -> None:
        for party in self.parties.values():
            if party is not None:
                party.close()

    def ask(self, arm: Arm, do: str, **arguments: Any) -> list[Any]:
        """Of the arm's ranks, all others at rest, with the settings of Horovod that it needs."""
        chosen = self.parties[arm.process]
        assert chosen is not None
        for party in self.parties.values():
            if party is not None and party is not chosen:
                party.rest()
        if self.settings(arm, dict(arm.horovod)) and do == "measure":
            arguments["warm"] += 1  # names are not in Horovod's cache yet
        return chosen.ask(do, **arguments)

    def settings(self, arm: Arm, horovod: dict[str, str]) -> bool:
        """Gives the arm's processes these settings of Horovod, if they have others. Says whether they had."""
        party = self.parties[arm.process]
        if party is None or self.horovod.get(arm.process, {}) == horovod:
            return False
        party.ask("init", port=party.rendezvous.port(), environment=horovod)
        self.horovod[arm.process] = horovod
        return True

    def keep(self, arms: Sequence[Arm], but: str = "HOROVOD_CYCLE_TIME") -> None:
        """Ends the processes whose name has `but` in it, except those of these arms."""
        kept = {arm.process for arm in arms}
        for name in [name for name in self.parties if but in name and name not in kept]:
            party = self.parties.pop(name)
            if party is not None:
                party.close()

    def works(self, arm: Arm) -> bool:
        return self.parties.get(arm.process) is not None

    def turn(self, arm: Arm, steps: int) -> dict[str, Any]:
        """Seconds of each step (mean over the ranks), and the other figures of a step (mean; memory: the most)."""
        again = 0
        while True:
            noise = Noise()
            ranks = self.ask(arm, "measure", steps=steps, warm=1, **arm.told)
            foreign = noise.foreign(sum(rank["turn_cpu_seconds"] for rank in ranks))
            if foreign <= FOREIGN or again == AGAIN or self.again == AGAIN_IN_A_CELL:
                break
            again += 1
            self.again += 1
        return {
            "seconds": [statistics.fmean(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)],
            **{
                key: statistics.fmean(rank[key] for rank in ranks)
                for key in ("whole_seconds", "cpu_seconds", "sent_bytes")
            },
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
            "foreign": foreign,
            "again": again,
        }

    def attempt(self, arm: Arm, steps: int) -> list[dict[str, Any]]:
        """A turn; none, and none from now on, if the program of another project fails in it."""
        try:
            return [self.turn(arm, steps)]
        except PartyError as error:
            if arm.party in OURS:
                raise
            party, self.parties[arm.process] = self.parties[arm.process], None
            self.missing[arm.process] = str(error).splitlines()[0]
            if party is not None:
                party.close()
            return []


class Noise:
    """What others take of the machine while a turn lasts."""

    def __init__(self) -> None:
        self.began, self.busy = time.perf_counter(), _busy_seconds()

    def foreign(self, own_seconds: float) -> float:
        """The share of all cores' time that went to others than the turn's ranks, who took `own_seconds`."""
        passed = (time.perf_counter() - self.began) * (os.cpu_count() or 1)
        return max(0.0, _busy_seconds() - self.busy - own_seconds) / passed


def _busy_seconds() -> float:
    """User, nice, system and stolen time of all cores; the kernel's network interrupts are our own messages."""
    user, nice, system, _, _, _, _, stolen = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def cell(bench: Bench, effort: Effort, policies: Sequence[str], parties: Sequence[str]) -> dict[str, Any]:
    """Measures everything at the link speed that the ground has now."""
    bench.again = 0
    arms = [arm for arm in arms_.fixed(parties, policies, effort.within) if bench.works(arm)]
    planned = _plan(bench, arms, policies)
    arms = [arm for arm in arms if arm.party != "caramel" or arm.told["policy"] in planned["policies"][arm.process]]
    tuning: dict[str, Any] = {}
    if "horovod" in parties and effort.tuning:
        best, tuning = _tune(bench, effort)
        arms += best
        if effort.autotune_seconds:
            tuning["autotune"] = _autotune(bench, effort)
            arms.append(arms_.AUTOTUNED)
    turns: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for number in range(effort.rounds):
        for arm in arms:
            bench.say(f"round {number + 1} of {effort.rounds}: {arm.name}")
            if bench.works(arm):
                turns[arm.name] += bench.attempt(arm, _steps(effort, turns[arm.name]))
    arms = [arm for arm in arms if bench.works(arm)]
    messages = _messages(bench, arms)
    return {
        "arms": {
            arm.name: {
                "party": arm.party,
                "process": arm.process,
                "turns": turns[arm.name],
                "messages": messages.get(arm.name),
            }
            for arm in arms
        },
        "facts": {name: {k: v for k, v in told.items() if k != "layers"} for name, told in bench.facts.items()},
        "missing": dict(bench.missing),
        "tuning": tuning,
        **planned,
        "load": os.getloadavg(),
    }


def _steps(effort: Effort, turns: Sequence[dict[str, Any]]) -> int:
    """Of an arm's next turn, by what its last one took."""
    if not turns:
        return effort.steps
    return max(effort.steps, round(effort.turn_seconds / statistics.median(turns[-1]["seconds"])))


def _plan(bench: Bench, arms: Sequence[Arm], policies: Sequence[str]) -> dict[str, Any]:
    """Each process of this project plans anew for the link as it is now."""
    planned: dict[str, Any] = {"policies": {}, "planning": {}, "why": []}
    for arm in {arm.process: arm for arm in arms if arm.party == "caramel"}.values():
        bench.say(f"planning: {arm.process}")
        began = time.perf_counter()
        told = bench.ask(arm, "plan", policies=list(policies))[0]
        told["seconds"] = time.perf_counter() - began
        planned["policies"][arm.process] = told.pop("arms")
        planned["why"] += told.pop("why")
        planned["planning"][arm.process] = told
    return planned


def _tune(bench: Bench, effort: Effort) -> tuple[list[Arm], dict[str, Any]]:
    """The best of plain Horovod's tuned cells after a quick pass: all fusion thresholds and groups, then the other
    cycle times with the best of them (effort.everything: with all of them).
    """
    seconds: dict[str, float] = {}
    known: dict[str, Arm] = {}
    for cycle in arms_.CYCLES:
        fusions: Sequence[float] = arms_.FUSIONS
        if cycle != 1:
            if not effort.cycles:
                continue
            if not effort.everything:
                best = known[min(seconds, key=lambda name: seconds[name])]
                settings = {**best.horovod, **best.env}
                fusions = [int(settings["HOROVOD_FUSION_THRESHOLD"]) / arms_.MB]
        cells = arms_.tuned(cycle, fusions)
        if cycle != 1 and not effort.everything:
            cells = [arm for arm in cells if arm.told == best.told]
        for arm in cells:
            bench.say(f"tuning: {arm.name}")
            bench.launch([arm])
            seconds[arm.name] = statistics.median(bench.turn(arm, 2)["seconds"])
            known[arm.name] = arm
    measured_anyway = replace(arms_.AS_IT_COMES, name="")
    others = [name for name in seconds if replace(known[name], name="") != measured_anyway]
    best_names = sorted(others, key=lambda name: seconds[name])[:KEPT]
    bench.keep([known[name] for name in best_names])
    return [known[name] for name in best_names], {"quick": seconds, "best": best_names, "cells": TUNED}


def _autotune(bench: Bench, effort: Effort) -> dict[str, Any]:
    """Horovod's own tuning, in a fresh process at this link, for a bounded time."""
    bench.keep([], arms_.AUTOTUNED.process)
    Path(arms_.AUTOTUNED.env["HOROVOD_AUTOTUNE_LOG"]).unlink(missing_ok=True)
    bench.launch([arms_.AUTOTUNED])
    bench.say("autotune")
    told: dict[str, Any] = bench.ask(arms_.AUTOTUNED, "settle", seconds=effort.autotune_seconds)[0]
    return told


def _messages(bench: Bench, arms: Sequence[Arm]) -> dict[str, float]:
    """A step's messages, by Horovod's timeline, in turns that are not timed.

    Only of processes where Horovod can be initialised again and nothing is lost by it.
    """
    found = {}
    timeline = {"HOROVOD_TIMELINE": "DYNAMIC"}
    countable = [arm for arm in arms if arm.party in ("horovod", "caramel") and not arm.env and arm is not arms_.LOCAL]
    for arm in countable:
        bench.say(f"counting messages: {arm.name}")
        found[arm.name] = bench.ask(replace(arm, horovod=dict(arm.horovod) | timeline), "count", steps=2, **arm.told)[0]
    for arm in {arm.process: arm for arm in countable}.values():  # the timeline's thread must be gone again
        bench.settings(arm, dict(arm.horovod))
    return found
