"""How long notebook 01's explorer takes to redraw at M = 64 with all eight methods shown.

    python tests/benchmarks/bench_explorer.py

Turns tau to a new value forty times, as a drag does, and prints wall-clock and processor time.
"""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import numpy as np

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "01_weighting_curve.ipynb"


def main() -> None:
    scope: dict = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.id in ("imports", "methods", "explorer"):
            exec(cell.source, scope)  # the repository's own text
    explorer = scope["explorer"]
    for name, slider in explorer.sliders.items():
        slider.value = {"group_size": 64, "match_scale": False}.get(name, slider.value if name == "tau" else True)
    explorer._repr_mimebundle_()  # shown: from now on the widgets change, too
    times = []
    for tau in np.geomspace(0.02, 5, 40):
        wall, cpu = time.perf_counter(), time.process_time()
        explorer.sliders["tau"].value = tau
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    for name, column in zip(("wall-clock", "processor"), np.array(times).T * 1e3):
        print(f"{name:10s} best {column.min():5.1f}  median {np.median(column):5.1f}  "
              f"95 of 100 below {np.percentile(column, 95):5.1f} ms")


if __name__ == "__main__":
    main()
