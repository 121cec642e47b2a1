"""Trains the same Keras model twice on two local ranks, first plain, then with TF_CARAMEL=1, and compares.

Prints a table and writes the same figures to build/demo.json. Call it through `make demo`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
RANKS = 2
LIMIT_SECONDS = 240


def main() -> int:
    console = Console()
    console.print(f"Training a Keras model on scikit-learn's digits, {RANKS} local ranks, twice.")
    runs = {}
    for number, (name, flag) in enumerate((("plain", "0"), ("TF_CARAMEL=1", "1")), start=1):
        result = train(console, f"run {number} of 2, {name}", flag)
        if result is None:
            return 1
        runs[name] = result
    figures = compare(runs)
    BUILD.mkdir(exist_ok=True)
    (BUILD / "demo.json").write_text(json.dumps(figures, indent=2) + "\n")
    show(console, figures)
    return 0 if figures["weights equal"] else 1


def train(console: Console, label: str, flag: str) -> list[dict[str, Any]] | None:
    """One horovodrun of keras_fit.py; what each rank measured, or None after showing the log's end."""
    folder = BUILD / f"demo-{flag}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [horovodrun, "-np", str(RANKS), sys.executable, ROOT / "examples" / "keras_fit.py", "--measure", folder]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TF_CARAMEL")}
    # A rank's share of the cores, or the ranks' threads steal from each other.
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    env |= {"TF_CARAMEL": flag, "TF_CARAMEL_CACHE": "off", "HOROVOD_TIMELINE": "DYNAMIC"}
    env |= {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads}
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(list(map(str, command)), env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() - began < LIMIT_SECONDS:
                progress(console, label, began, log)
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()  # horovodrun ends its ranks
                process.wait()
    if console.is_terminal:
        console.print()
    files = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    if process.returncode or not all(f.exists() for f in files):
        console.print(f"[red]{label} failed[/red] (exit code {process.returncode}); the end of {log}:")
        console.print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), markup=False)
        return None
    return [json.loads(f.read_text()) for f in files]


def progress(console: Console, label: str, began: float, log: Path) -> None:
    epochs = [line for line in log.read_text(errors="replace").splitlines() if "Epoch " in line]
    state = epochs[-1].partition("Epoch ")[2].strip() if epochs else "starting"
    line = f"{label}: {time.monotonic() - began:3.0f} s, epoch {state}" if epochs else f"{label}: {state}"
    if console.is_terminal:
        console.print(f"\r{line:<70}", end="")
    elif state != progress.__dict__.get("last"):
        console.print(line)
    progress.__dict__["last"] = state


def compare(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The table's figures. E = (U - m) / (U - L): m step time, U = compute + communication, L the larger of them.

    Compute and communication alone are measured on every rank of the plain run; both runs' E use the medians.
    """
    everyone = [rank for ranks in runs.values() for rank in ranks]
    compute = statistics.median(rank["compute_seconds"] for rank in runs["plain"])
    communication = statistics.median(rank["communication_seconds"] for rank in runs["plain"])
    upper, lower = compute + communication, max(compute, communication)
    figures: dict[str, Any] = {
        "ranks": RANKS,
        "gradient bytes": everyone[0]["gradient_bytes"],
        "compute alone ms": round(compute * 1e3, 2),
        "communication alone ms": round(communication * 1e3, 2),
        "runs": {},
    }
    for name, ranks in runs.items():
        step = max(rank["step_seconds"] for rank in ranks)
        figures["runs"][name] = {
            "step ms": round(step * 1e3, 2),
            "messages per step": ranks[0]["messages_per_step"],
            "E": round((upper - step) / (upper - lower), 3),
            "ranks equal": all(rank["weights"] == ranks[0]["weights"] for rank in ranks),
        }
    figures["weights equal"] = all(rank["weights"] == everyone[0]["weights"] for rank in everyone)
    return figures


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(title=f"{RANKS} ranks, {figures['gradient bytes'] / 1e6:.1f} MB of gradients a step")
    for column in ("run", "step", "messages a step", "efficiency E", "weights equal on all ranks"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, run in figures["runs"].items():
        table.add_row(
            name,
            f"{run['step ms']:.1f} ms",
            f"{run['messages per step']:.1f}",
            f"{run['E']:.2f}",
            "yes" if run["ranks equal"] else "NO",
        )
    console.print(table)
    console.print(
        f"Weights and optimizer state of both runs bit for bit equal: {'yes' if figures['weights equal'] else 'NO'}"
    )
    console.print(
        f"Alone: compute {figures['compute alone ms']:.1f} ms, communication "
        f"{figures['communication alone ms']:.1f} ms a step (E = 1: all of the smaller one hidden, 0: none)."
    )
    console.print(
        "Figures: build/demo.json. Two ranks on one machine share its cores: this shows that it works, not what a "
        "slow link would gain."
    )


if __name__ == "__main__":
    sys.exit(main())
