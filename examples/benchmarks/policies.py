"""All policies on two emulated hosts, in turns within one run, beside what the simulator says they take.

    python -m examples.benchmarks.policies [--models resnet50,vgg] [--mbit 200,500,1000] [--rounds 4]

Each cell (model x rate) is one run of two ranks on two hosts of one core each. Prints a table a cell, writes one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.benchmarks import hosts

ROOT = Path(__file__).parents[2]
POLICIES = (
    "fifo,none", "fifo,fixed:1MB", "fifo,fixed:8MB", "fifo,fixed:32MB", "fifo,fixed:128MB", "fifo,mgwfbp",
    "tac,mgwfbp", "caramel,mgwfbp", "caramel,adaptive",
)  # fmt: skip
LIMIT_SECONDS = 900.0


def cell(emulated: hosts.Hosts, model: str, batch: int, rounds: int, policies: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="caramel-bench-") as name:
        folder = Path(name)
        arguments = [model, str(batch), str(rounds), "+".join(policies), str(folder / "result.json")]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TF_CARAMEL", "HOROVOD_"))}
        env |= {"TF_CARAMEL": "1", "TF_CARAMEL_CACHE": "off", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "examples.benchmarks.compare", *arguments]
        codes = hosts.run_ranks(emulated, command, env, folder, LIMIT_SECONDS)
        if any(codes) or not (folder / "result.json").exists():
            tail = (folder / "rank0.log").read_text()[-2000:]
            raise SystemExit(f"{model}: the ranks ended with {codes}\n{tail}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        result["profile"] = json.loads((folder / "result.profile.json").read_text())
        return result


def table(title: str, result: dict[str, Any]) -> Table:
    facts = (
        f"compute {1e3 * result['compute']:.0f} ms, {1e3 * result['communication']:.0f} ms in one message, "
        f"a {1e3 * result['start_up']:.1f} ms, {1e3 * result['seconds_per_mb']:.1f} ms a MB"
    )
    made = Table(title=f"{title}: {facts}", title_justify="left")
    for column in ("plan", "messages", "measured ms", "spread", "ratio", "E", "simulated ms", "error"):
        made.add_column(column, justify="left" if column == "plan" else "right")
    traced = result["arms"]["traced"]["median"]
    for arm, row in result["arms"].items():
        spread = (max(row["seconds"]) - min(row["seconds"])) / row["median"]
        made.add_row(
            "Horovod as it comes" if arm == "traced" else arm,
            str(row["messages"]),
            f"{1e3 * row['median']:.0f}",
            f"{spread:.0%}",
            f"{row['median'] / traced:.2f}",
            f"{row['efficiency']:.2f}",
            f"{1e3 * row['predicted']:.0f}",
            "held to" if arm == "traced" else f"{row['predicted'] / row['median'] - 1:+.0%}",
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vgg,mobilenet")
    parser.add_argument("--mbit", default="200,500,1000")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--policies", default="+".join(POLICIES), help="separated by +")
    parser.add_argument("--json", type=Path, help="where to write all results")
    options = parser.parse_args()
    console = Console(width=120)
    results: dict[str, Any] = {}
    hosts.sweep()
    rates = [float(rate) for rate in options.mbit.split(",")]
    try:
        with hosts.emulated(2, rates[0]) as emulated:
            for model in options.models.split(","):
                for rate in rates:
                    emulated.shape(rate)
                    title = f"{model} batch {options.batch} at {rate:g} Mbit/s"
                    results[title] = cell(emulated, model, options.batch, options.rounds, options.policies.split("+"))
                    results[title]["load"] = os.getloadavg()
                    console.print(table(title, results[title]))
                    if options.json:
                        options.json.write_text(json.dumps(results))
    except hosts.HostsError as error:
        console.print(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
