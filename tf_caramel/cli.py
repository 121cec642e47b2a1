"""The `caramel` command. Imports neither TensorFlow nor Horovod: it has to work where they do not."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tf_caramel import __version__, build_horovod, doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 it failed (said why), 2 wrong arguments, 130 interrupted."""
    options = _parser().parse_args(argv)
    # No markup: paths and error texts may hold brackets, which rich would take for its own.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end what was started, as on Ctrl-C; nohup's ignoring stays
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        if options.command == "doctor":
            return 0 if doctor.diagnose(console) else 1
        chosen = build_horovod.Options(options.with_mpi, options.with_nccl, options.force, options.jobs, options.log)
        build_horovod.build(chosen, console)
    except build_horovod.BuildError as error:
        console.print(str(error))
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    return 0


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
    commands.add_parser("doctor", help="versions, what was built, interfaces, and what will not work")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
