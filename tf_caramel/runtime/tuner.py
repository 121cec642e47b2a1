"""The life of one step: run the first plan, trace some calls, plan from what was measured, judge, keep watching.

A coroutine that says of each call how it is to run and is told how it went. All ranks walk through it in step: they
count the same calls, and every decision is made from what `ranks.agree` or an all-reduce gave to all of them.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tf_caramel.planner import decide
from tf_caramel.planner.calibrate import calibrate
from tf_caramel.planner.plan import Plan
from tf_caramel.planner.profile import Profile
from tf_caramel.planner.record import Observed, Record
from tf_caramel.runtime import fitting, probe, profiling

if TYPE_CHECKING:
    from tf_caramel.runtime.step import Function, Step

log = logging.getLogger("tf_caramel")

ROUNDS, CALLS = 3, 3  # how the arms are judged: in turns, so many calls each; an arm's first ones are not counted
WARM = 2
UNTRACED = 3  # calls before the traced ones, to tell what tracing costs
SLOWEST = 4.0  # so many times its shortest time is the most that an op is believed to take
CHECK_SECONDS = 30.0  # how often the step time and the link are looked at again
CHECK_BYTES = 2**20
DRIFT = 0.2
STRIKES = 2  # so many checks in a row, for one may be noise


@dataclass(frozen=True)
class Call:
    """How the next call is to run."""

    arm: str
    traced: bool = False


@dataclass(frozen=True)
class Done:
    """How it went. arm: what ran.  cpu_seconds: of all threads of this process.
    trace: what the tracer gave, or why it gave nothing.
    steady: it ran as it does again and again (a first step that defers has nothing to apply).
    """

    function: Function
    arm: str
    steady: bool
    seconds: float
    cpu_seconds: float
    trace: bytes | str | None = None


Life = Generator[Call, Done, None]


@dataclass
class Tuner:
    """step: whose life it is.  reference: seconds of a call that the running plan is held to; None: not measured yet.
    profile, record: of the last measuring, on the rank that plans.  planned: the plan it led to.  steps: in one call.
    link: seconds of a message of CHECK_BYTES.  patience: longer and longer between checks that lead to measuring again.
    """

    step: Step
    reference: float | None = None
    profile: Profile | None = None
    planned: Plan | None = None
    steps: int = 1
    record: Record = field(default_factory=lambda: Record("", ""))
    link: float | None = None
    patience: float = 1.0

    def live(self) -> Life:
        yield Call(self.step.arm)  # TensorFlow builds the function in its first call
        if not self.step.plannable:
            yield from self._compare([self.step.arm, "traced"])
            while True:
                yield Call(self.step.arm)
        if self.reference is None:
            yield from self._improve()
        while True:
            yield from self._watch()
            self.patience *= 2  # a machine as noisy as that is not measured again and again
            yield from self._improve()

    def _improve(self) -> Life:
        """Traces, plans and judges; afterwards the best arm runs."""
        verdict = self._plan((yield from self.trace()))
        self.record = replace(self.record, why=tuple(verdict["why"]))
        arms = list(dict.fromkeys([self.step.plain, "traced"]))
        for arm in ("measured", "deferred", "loose"):
            if arm in verdict:
                self.planned = plan = Plan.from_json(verdict[arm])
                reason = f"the {arm} plan runs already" if self.step.runs(plan) else self.step.add(arm, plan)
                if reason is None:
                    arms = [arm, *(other for other in arms if other != arm)]
                else:
                    self._say_not(reason)
        yield from self._compare(arms)

    def trace(self) -> Generator[Call, Done, list[Done]]:
        """Some calls untraced, then some traced: how each went."""
        calls = []
        for traced in [False] * UNTRACED + [True] * self.step.config.trace_steps:
            calls.append((yield Call(self.step.plain, traced)))
        return calls

    def _compare(self, arms: list[str]) -> Life:
        """Runs the arms in turns; the fastest runs from then on."""
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(ROUNDS):
            warm = 0 if number else WARM
            for arm in arms:
                for k in range(warm + CALLS):
                    done = yield Call(arm)
                    # What ran before left its marks (caches, the other arm's last message): the first is not counted.
                    if k > warm and done.arm == arm and done.steady:
                        seconds[arm].append(done.seconds)
        self._judge({arm: times for arm, times in seconds.items() if times})

    def _plan(self, calls: list[Done]) -> dict[str, Any]:
        """The ranks merge what they traced; one of them plans. {"why": [...]} and, if all is well, "plan"."""
        fitting.across(self.step)  # the ranks agree on it here, where none of them can have failed yet
        try:
            mine = profiling.observe(self.step, calls, probe.network())
        except Exception as error:  # the others have to be told, or they would wait
            log.debug("tf_caramel: profiling failed", exc_info=True)
            mine = {"failed": f"{type(error).__name__}: {error}"}
        return self.step.agree("profile", mine, self._merge_and_plan)

    def merged(self, shown: dict[int, Any]) -> profiling.Facts:
        """Makes the profile of what the ranks showed."""
        seen, facts = profiling.merge(self.step.key, shown)
        self.steps = facts.steps
        running = self.step.plans.get(self.step.plain)
        self.profile = calibrate(seen, running.bodies[0] if running else None, facts.step_seconds)
        return facts

    def decided(self, policy: str, plain: Plan | None = None) -> Plan:
        """The plan that a policy, written as in TF_CARAMEL_PLAN, makes of the profile.

        plain: what it made without deferring, if now it is to defer what is worth it.
        """
        assert self.profile is not None
        deferring = {"defer": True, "plain": plain.bodies[0]} if plain else {}
        return Plan((decide.decide(self.profile, *decide.parse(policy), **deferring),), policy)

    def arms(self, policy: str, defer: bool) -> dict[str, Plan]:
        """What a policy makes of the profile, to be judged: with `defer` also the two that defer, if there is anything
        worth it."""
        plans = {"measured": self.decided(policy)}
        if defer:
            deferring = self.decided(policy, plans["measured"])
            if deferring.bodies[0].deferred:
                plans["deferred"] = deferring
                plans["loose"] = Plan((decide.loosened(deferring.bodies[0]),), policy)
        return plans

    def _merge_and_plan(self, shown: dict[int, Any]) -> dict[str, Any]:
        try:
            facts = self.merged(shown)
            plans = self.arms(self.step.config.plan, all(shown[rank]["may_defer"] for rank in sorted(shown)))
        except profiling.CannotMergeError as reason:
            return {"why": [f"no measured plan: {reason}"]}
        except Exception as error:
            log.debug("tf_caramel: planning failed", exc_info=True)
            return {"why": [f"no measured plan: {type(error).__name__}: {error}"]}
        self.record = Record(
            self.step.key,
            self.step.label,
            len(shown),
            self.step.config.plan,
            traced_step_seconds=facts.traced_step_seconds,
            trace_cost=max(0.0, facts.traced_step_seconds / facts.step_seconds - 1),
            observed=tuple(Observed(*message) for message in facts.messages),
            unmatched=facts.unmatched,
        )
        return {arm: plan.to_json() for arm, plan in plans.items()} | {"why": facts.why}

    def _judge(self, seconds: dict[str, list[float]]) -> None:
        verdict = self.step.agree("judged", seconds, _judge)
        chosen, median = verdict["chosen"], verdict["median"]
        self.reference = median[chosen]
        said = ", ".join(f"{arm} {1e3 * median[arm]:.1f} ms" for arm in sorted(median))
        log.info("tf_caramel: %s runs as %s from now on (%s)", self.step.label, chosen, said)
        if chosen == "traced" and len(median) > 1:
            self._say_not(f"the function as traced is the fastest here ({said}), so it is what runs")
        self.record = replace(
            self.record,
            chosen=chosen,
            arms={arm: tuple(times) for arm, times in verdict["seconds"].items()},
        )
        if self.profile is not None and "traced" in median:  # now that it is known what a step takes in the long run
            self.profile = calibrate(self.profile, None, median["traced"] / self.steps, SLOWEST)
        self.step.settle(chosen, min((arm for arm in median if not self.step.defers(arm)), key=median.__getitem__))
        self.step.save()

    def _watch(self) -> Life:
        """Runs the chosen arm until the step time or the link has drifted."""
        strikes = 0
        while strikes < STRIKES:
            each = self.reference or 0.05
            calls = min(5000, max(20, math.ceil(self.patience * CHECK_SECONDS / max(each, 1e-6))))
            seconds = []
            for _ in range(calls):
                seconds.append((yield Call(self.step.arm)).seconds)
            now, link = probe.shared(statistics.median(seconds)), probe.check(CHECK_BYTES)
            drifted = [
                f"{what} from {1e3 * before:.1f} to {1e3 * after:.1f} ms"
                for what, before, after in (("the step", self.reference, now), ("1 MB on the link", self.link, link))
                if before is not None and abs(after / before - 1) > DRIFT
            ]
            strikes = strikes + 1 if drifted else 0
            self.reference, self.link = self.reference or now, self.link or link
            if strikes == STRIKES:
                log.info("tf_caramel: %s is measured again: %s", self.step.label, " and ".join(drifted))
        self.reference = self.link = None

    def _say_not(self, reason: str) -> None:
        self.record = replace(self.record, why=(*self.record.why, reason))
        log.info("tf_caramel: %s: %s", self.step.label, reason)


def _judge(shown: dict[int, Any]) -> dict[str, Any]:
    """Which arm has the shortest median step, a call's time being the mean over the ranks."""
    arms = list(shown[min(shown)])
    seconds = {
        arm: [statistics.fmean(times) for times in zip(*(shown[r][arm] for r in sorted(shown)), strict=True)]
        for arm in arms
    }
    median = {arm: statistics.median(times) for arm, times in seconds.items()}
    return {"chosen": min(arms, key=lambda arm: median[arm]), "median": median, "seconds": seconds}
