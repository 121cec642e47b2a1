"""One picture of a run: the step times of a few competitors in every cell, as multiples of the bound max(C, N)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.benchmarks import arms
from examples.benchmarks.figures import PRODUCT, TUNED, figures
from examples.benchmarks.tables import title

SHOWN = {
    arms.UNFUSED.name: "#c9c9c9",
    arms.MWMS.name: "#e0a458",
    arms.AS_IT_COMES.name: "#8fb8de",
    TUNED: "#3a6ea5",
    PRODUCT: "#2a9d5c",
}
MOST = 4.0  # bars are cut there, with their number beside them


def _lines(name: str) -> str:
    return name.replace(", ", "\n", 1).replace(", emulated", "\nemulated").replace(", where", "\nwhere")


def draw(results: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    cells = [(title(cell), figures(cell)) for cell in results["cells"].values()]
    height = 0.16
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.9 * max(1, len(cells))))
    for k, (name, colour) in enumerate(SHOWN.items()):
        for place, (_, f) in enumerate(cells):
            row = f.rows.get(name)
            if row is None or not row.to_bound:
                continue
            y = place + (k - len(SHOWN) / 2 + 0.5) * height
            axes.barh(y, min(row.to_bound, MOST), height, color=colour, label=name)
            axes.text(min(row.to_bound, MOST) + 0.03, y, f"{row.to_bound:.2f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(cells)), [_lines(name) for name, _ in cells], fontsize=7)
    axes.invert_yaxis()
    bars = [row.to_bound for _, f in cells for name in SHOWN if (row := f.rows.get(name)) and row.to_bound]
    axes.set_xlim(0, min(MOST, max(bars, default=1.0)) + 0.5)
    axes.set_xlabel("step time / max(C, N); the line is the bound")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="upper center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / figure.get_figheight()))
    figure.savefig(path, dpi=130)
    plt.close(figure)
