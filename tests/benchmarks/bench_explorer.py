"""How long notebook 01's explorer takes to redraw: wall-clock and processor time at M = 64, eight methods shown.

    python tests/benchmarks/bench_explorer.py

Turns tau to a new value each time, as a drag does, and prints the median and the 95th percentile in milliseconds.
"""

from __future__ import annotations

import time

import numpy as np

from sage_lite import advantages, explore, plots, theory

P = np.linspace(0, 1, 101)
METHODS = ("sage", "grpo", "dr_grpo", "rloo", "reinforce", "maxrl", "sign", "focal_grpo")


def draw(axes, tau, group_size, **shown):
    for name in (n for n in METHODS if shown[n]):
        advantage = advantages.get(name, **({"tau": tau} if name == "sage" else {}))
        axes.plot(P, theory.prompt_weight(advantage, P, group_size), **plots.style(name))
    axes.set(xlabel="pass rate p", ylabel="w(p)")
    axes.legend(loc="upper right")


def main() -> None:
    explorer = explore.Explorer(draw, tau=(0.01, 10.0, 0.1, "log"), group_size=(2, 64, 64), **dict.fromkeys(METHODS, True))
    explorer._repr_mimebundle_()  # shown: from now on the widgets change, too
    times = []
    for tau in np.geomspace(0.02, 5, 40):
        wall, cpu = time.perf_counter(), time.process_time()
        explorer.sliders["tau"].value = tau
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    for name, column in zip(("wall-clock", "processor"), np.array(times).T * 1e3):
        print(f"{name:10s} median {np.median(column):5.1f} ms, 95 of 100 below {np.percentile(column, 95):5.1f} ms")


if __name__ == "__main__":
    main()
