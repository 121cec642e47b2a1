"""Compares this project with its competitors on emulated hosts, in turns within one run.

    python -m examples.benchmarks                 all models on one link, about an hour (make bench)
    python -m examples.benchmarks --whole         all links, accelerators and numbers of hosts, most of a day
    python -m examples.benchmarks --quick         two models, one link
    python -m examples.benchmarks --models resnet50 --mbit 1000,balance --parties horovod,caramel

Needs root and iproute2 for the emulated hosts; without, ranks run on loopback, which the tables say. Writes
results.json, results.md and results.png into a folder, after each cell, and the cell's profile, which
`caramel simulate` reads. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from examples.benchmarks import arms, hosts, measure
from examples.benchmarks.grid import BALANCE, Grid, Output, run
from examples.benchmarks.parties import PartyError

MODELS = ("resnet50", "vgg", "mobilenet", "densenet", "bert", "mlp")
HOUR = Grid(MODELS, (1000,), policies=arms.POLICIES[1:3], effort=measure.Effort(3, 3, cycles=False, autotune_seconds=0))
WHOLE = Grid(MODELS, (100, 500, 1000, 2000, 10_000, BALANCE), hosts=(2, 4), accelerator=(0.5, 1.0, 2.0),
             effort=measure.Effort(within=True))  # fmt: skip
QUICK = dataclasses.replace(HOUR, models=("mobilenet", "mlp"))
SMOKE = Grid(("mlp",), (10_000,), parties=("horovod", "caramel"), policies=(),
             effort=measure.Effort(1, 2, cycles=False, autotune_seconds=0), scale=(2, 8))  # fmt: skip


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m examples.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--whole", action="store_true", help="everything, most of a day")
    size.add_argument("--quick", action="store_true", help="two models, one link, some ten minutes")
    size.add_argument("--smoke", action="store_true", help="the mechanics only, one minute")
    parser.add_argument("--models", help="separated by commas")
    parser.add_argument(
        "--mbit",
        help=f"link speeds in Mbit/s, or {BALANCE}: where computing and network are equal; '': only --accelerator",
    )
    parser.add_argument("--hosts", help="2, 4 or both")
    parser.add_argument("--parties", help=f"of {','.join(arms.PROGRAMS)}")
    parser.add_argument("--policies", help="of this project, separated by +, as in TF_CARAMEL_PLAN")
    parser.add_argument("--accelerator", help="cells with an emulated accelerator: compute/communication, e.g. 0.5,1,2")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--within", action="store_true", help="also 4 steps in a call, deferring within calls")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="in a turn, at least")
    parser.add_argument(
        "--autotune", type=float, help="seconds that Horovod may tune itself in a cell; 0: not measured"
    )
    parser.add_argument(
        "--cycles", action="store_true", help="tune Horovod's cycle time too, with the best of the rest"
    )
    parser.add_argument("--all-tuned", action="store_true", help="every cell of Horovod's tuning (a launch for most)")
    parser.add_argument("--untuned", action="store_true", help="plain Horovod as it comes only")
    parser.add_argument("--loopback", action="store_true", help="no emulated hosts")
    parser.add_argument("--add", action="store_true", help="keep the cells that are in the folder's results.json")
    parser.add_argument("--only-tables", action="store_true", help="from results.json, nothing is measured")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    return parser.parse_args()


def grid(given: argparse.Namespace) -> Grid:
    base = WHOLE if given.whole else QUICK if given.quick else SMOKE if given.smoke else HOUR
    changed: dict[str, object] = {}
    for name, convert in (
        ("models", str),
        ("mbit", lambda text: text if text == BALANCE else float(text)),
        ("hosts", int),
        ("parties", str),
        ("accelerator", float),
    ):
        text = getattr(given, name)
        if text is not None:
            changed[name] = tuple(convert(word) for word in text.split(",") if word)
    if given.policies is not None:
        changed["policies"] = tuple(word for word in given.policies.split("+") if word)
    effort = {"rounds": given.rounds, "steps": given.steps, "autotune_seconds": given.autotune}
    changed["effort"] = dataclasses.replace(
        base.effort,
        cycles=base.effort.cycles or given.cycles or given.all_tuned,
        everything=given.all_tuned,
        tuning=not given.untuned,
        within=base.effort.within or given.within,
        **{key: value for key, value in effort.items() if value is not None},
    )
    if given.batch:
        changed["batch"] = given.batch
    return dataclasses.replace(base, loopback=given.loopback, **changed)  # type: ignore[arg-type]


def main() -> int:
    given = options()
    console = Console(stderr=True, width=120)
    command = shlex.join(["python", "-m", "examples.benchmarks", *sys.argv[1:]])
    output = Output.of(given.out, "" if given.only_tables else command, given.add or given.only_tables)
    if given.only_tables:
        output.render()
        return 0
    chosen = grid(given)
    if "ddp" in chosen.parties and "horovod" not in chosen.parties:
        console.print("ddp needs horovod, which tells it the layers")
        return 2
    reason = hosts.why_not()
    if reason:
        console.print(f"no emulated hosts: {reason}. Ranks run on loopback: only the mechanics are the same.")
    began, before = time.monotonic(), len(output.results["cells"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken down
    try:
        with console.status("") as status:

            def say(text: str) -> None:
                done, minutes = len(output.results["cells"]) - before, (time.monotonic() - began) / 60
                left = f" of about {minutes / done * chosen.cells():.0f}" if done else ""
                line = f"cell {done + 1} of {chosen.cells()}, {minutes:.0f}{left} min: {text}"
                if console.is_terminal:
                    status.update(line)
                else:
                    print(line, file=sys.stderr)

            run(chosen, output, say)
    except (hosts.HostsError, PartyError) as error:
        console.print(f"[red]{error}", highlight=False)
        return 1
    console.print(f"{given.out}/results.md, .json, .png", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
