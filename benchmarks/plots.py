# SPDX-License-Identifier: Apache-2.0
"""Plots of results; without matplotlib there are none."""

import importlib.util
from pathlib import Path
from typing import Any

COLORS = {
    "loop": "#1b6ca8",
    "unrolled": "#e07a1f",
    "one": "#9a9a9a",
    "dispatch": "#c9c9c9",
    "eager": "#3a9a5b",
}


def pyplot() -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is missing: pip install matplotlib")
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, report: Path) -> None:
    path = report.with_suffix(".png")
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def title(report: dict[str, Any]) -> str:
    return f"{report['device']}, JAX {report['versions']['jax']}, {report['date']}"


def plot_calls(report: dict[str, Any], path: Path) -> None:
    """A line of dots for each row, on a logarithmic axis; beside the report."""
    if (plt := pyplot()) is None:
        return
    rows = {name: row for name, row in report["rows"].items() if set(row) & set(COLORS)}
    names = list(rows)[::-1]
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.28 * len(names)), layout="constrained")
    for way, color in COLORS.items():
        points = [(rows[name][way], i) for i, name in enumerate(names) if way in rows[name]]
        if points:
            axes.scatter(*zip(*points, strict=True), color=color, label=way, s=42, zorder=3)
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("jaxbridge"):
            label.set_fontweight("bold")
    axes.set_xscale("log")
    axes.set_xlabel("microseconds per call (median), float32[1024]")
    axes.grid(color="#e6e6e6", zorder=0)
    axes.set_title(title(report), loc="left")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=5, frameon=False)
    save(figure, path)


def plot_growth(report: dict[str, Any], path: Path) -> None:
    """A panel for each question; beside the report."""
    if (plt := pyplot()) is None:
        return
    panels = report["panels"]
    figure, grid = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
    for axes, panel in zip(grid.flat, panels, strict=True):
        for name, points in panel["lines"].items():
            ours = name.startswith("jaxbridge")
            style = {
                "linewidth": 2.2 if ours else 1.2,
                "linestyle": "--" if "views" in name else "-",
            }
            x = [int(n) for n in points]
            axes.plot(x, list(points.values()), marker="o", markersize=4, label=name, **style)
        values = [v for points in panel["lines"].values() for v in points.values()]
        axes.set_xscale("log")
        if max(values) > 10 * min(values):
            axes.set_yscale("log")
        else:
            axes.set_ylim(0)
        axes.set_xlabel(panel["x"])
        axes.set_title(panel["y"], loc="left", fontsize=10)
        axes.grid(color="#e6e6e6")
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title(report), x=0.01, ha="left")
    save(figure, path)
