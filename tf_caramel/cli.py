"""The `caramel` command. Imports neither TensorFlow nor Horovod: it has to work where they do not."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from tf_caramel import __version__, build_horovod, doctor
from tf_caramel.planner.decide import asks_for_deferral, decide, parse
from tf_caramel.planner.defer import deferrable, obstacles
from tf_caramel.planner.network import COLLECTIVES
from tf_caramel.planner.plan import Plan
from tf_caramel.planner.profile import InputError, Profile
from tf_caramel.planner.search import EFFORTS
from tf_caramel.planner.what_if import POLICIES, defers, to_data, what_if
from tf_caramel.see import reports, tables

NONE_DEFERRABLE = "no transfer of this profile is known to be deferrable"
_Number = TypeVar("_Number", int, float)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 it failed (said why), 2 wrong arguments, 130 interrupted."""
    options = _parser().parse_args(argv)
    # No markup: paths and error texts may hold brackets, which rich would take for its own.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end what was started, as on Ctrl-C; nohup's ignoring stays
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        done: bool = options.run(options, console)
    except (build_horovod.BuildError, InputError) as error:
        console.print(str(error))
        return 1
    except OSError as error:
        console.print(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    return 0 if done else 1


def _build_horovod(options: argparse.Namespace, console: Console) -> bool:
    chosen = build_horovod.Options(options.with_mpi, options.with_nccl, options.force, options.jobs, options.log)
    build_horovod.build(chosen, console)
    return True


def _doctor(options: argparse.Namespace, console: Console) -> bool:
    return doctor.diagnose(console)


def _plan(options: argparse.Namespace, console: Console) -> bool:
    profile = _profile(options.profile)
    order, batches = parse(f"{options.order},{options.batches}")
    if options.defer and not asks_for_deferral(batches):
        batches += ",defer"
    plan = Plan((decide(profile, order, batches, options.effort),), origin=f"{order},{batches}")
    console.print(tables.view(reports.Entry(profile.key, reports.Step.of(profile, plan))), soft_wrap=False)
    _say_why_not_deferred(profile, asks_for_deferral(batches), console)
    if options.output:
        options.output.write_text(plan.to_json() + "\n")
        console.print(f"The plan is in {options.output}.")
    return True


def _simulate(options: argparse.Namespace, console: Console) -> bool:
    profile = _profile(options.profile)
    latency_seconds = None if options.latency_us is None else options.latency_us * 1e-6
    ranks = options.ranks or [profile.network.ranks]
    setting = {"latency_seconds": latency_seconds, "collective": options.collective, "effort": options.effort}
    rows = what_if(profile, ranks, options.gbit, options.policies, **setting)
    for grid in tables.what_ifs(profile, rows, options.policies, console.width):
        console.print(tables.to_rich(grid), soft_wrap=False)
    _say_why_not_deferred(profile, any(map(defers, options.policies)), console)
    if options.json:
        data = to_data(profile, rows, options.policies) | setting
        options.json.write_text(json.dumps(data, indent=1) + "\n")
        console.print(f"The numbers are in {options.json}.")
    return True


def _say_why_not_deferred(profile: Profile, asked: bool, console: Console) -> None:
    if not asked or deferrable(profile):
        return
    flagged = [t.name for t in profile.transfers if t.deferrable]
    why = f"{flagged[0]!r} cannot be: {obstacles(profile)[flagged[0]]}" if flagged else NONE_DEFERRABLE
    console.print(f"Nothing is deferred: {why}.")


def _report(options: argparse.Namespace, console: Console) -> bool:
    found = reports.report(options.folder)
    for entry in found.entries:
        console.print(tables.view(entry), soft_wrap=False)
    page, trace = options.html or options.folder / "report.html", options.chrome or options.folder / "trace.json"
    found.html(page)
    found.chrome(trace)
    console.print(f"The page is {page}, the trace for https://ui.perfetto.dev or chrome://tracing is {trace}.")
    return True


def _profile(file: Path) -> Profile:
    return Profile.from_json(reports.text_of(file), str(file))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="caramel", description="Tools of tf_caramel.")
    parser.add_argument("--version", action="version", version=f"caramel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    build = commands.add_parser("build-horovod", help="build Horovod for the TensorFlow that is installed, and test it")
    build.add_argument("--with-mpi", action="store_true", help="with MPI besides Gloo")
    build.add_argument("--with-nccl", action="store_true", help="with NCCL for GPUs")
    build.add_argument("--force", action="store_true", help="build anew even if it works or a wheel is kept")
    build.add_argument("--jobs", type=_positive, default=os.cpu_count() or 1, help="compilers at once (%(default)s)")
    build.add_argument("--log", type=Path, help="where the full log goes")
    build.set_defaults(run=_build_horovod)
    doctor_ = commands.add_parser("doctor", help="versions, what was built, interfaces, and what will not work")
    doctor_.set_defaults(run=_doctor)
    _add_planning(commands)
    return parser


def _add_planning(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="decide on a profile, and say what the plan is worth")
    plan.add_argument("--order", default="caramel", help="fifo, tic, tac or caramel (%(default)s)")
    plan.add_argument("--batches", default="adaptive", help="none, fixed:<bytes>, mgwfbp or adaptive (%(default)s)")
    plan.add_argument("--defer", action="store_true", help="transfers may travel in the next step's forward pass")
    plan.add_argument("--effort", choices=EFFORTS, default="full", help="of the search (%(default)s)")
    plan.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the plan goes, as JSON")
    plan.set_defaults(run=_plan)
    what = commands.add_parser("simulate", help="what the step would take on other networks and numbers of ranks")
    numbers = "a list like %s, where ... goes on doubling"
    what.add_argument(
        "--ranks", type=_list(_positive), metavar="LIST", help=numbers % "2,4,...,1024" + " (as measured)"
    )
    what.add_argument(
        "--gbit",
        type=_list(_speed),
        default=[None],
        metavar="LIST",
        help="of the link, " + numbers % "1,10" + " (as measured)",
    )
    what.add_argument("--latency-us", type=_speed, metavar="US", help="of a hop, part of the measured start-up (none)")
    what.add_argument("--collective", choices=COLLECTIVES, default=COLLECTIVES[0], help="(%(default)s)")
    what.add_argument(
        "--policies",
        type=lambda text: [word.strip() for word in text.split(",")],
        default=list(POLICIES),
        metavar="LIST",
        help=f"of horovod, unfused and <order>+<batches>, which may end in +defer ({','.join(POLICIES)})",
    )
    what.add_argument("--effort", choices=EFFORTS, default="quick", help="of each search (%(default)s)")
    what.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go")
    what.set_defaults(run=_simulate)
    for command in (plan, what):
        command.add_argument("profile", type=Path, metavar="PROFILE", help="profile.json of a training run")
    report = commands.add_parser("report", help="what a training run traced, decided and measured")
    report.add_argument("folder", type=Path, metavar="DIR", help="of one step function, or of such folders")
    report.add_argument("--html", type=Path, metavar="FILE", help="where the page goes (DIR/report.html)")
    report.add_argument("--chrome", type=Path, metavar="FILE", help="where the Chrome trace goes (DIR/trace.json)")
    report.set_defaults(run=_report)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _list(number: Callable[[str], _Number]) -> Callable[[str], list[_Number]]:
    """Reads numbers with commas between; "..." stands for the doubles of the number before it, up to the one after."""

    def read(text: str) -> list[_Number]:
        result: list[_Number] = []
        doubling = False
        for word in text.replace("\u2026", "...").split(","):
            if word.strip() == "...":
                doubling = bool(result)
                if not doubling:
                    break
                continue
            value = number(word.strip())
            while doubling and 2 * result[-1] < value:
                result.append(2 * result[-1])
            doubling = False
            result.append(value)
        if doubling or not result:
            raise argparse.ArgumentTypeError(f"{text!r}: ... needs a number on either side")
        return result

    return read
