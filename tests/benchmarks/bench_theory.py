"""Wall clock of a 1,000-point prompt-weight curve, the table included. Run: python tests/benchmarks/bench_theory.py"""
from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from sage_lite import theory

REPEATS = 15


def milliseconds(advantage: str, group_size: int) -> list[float]:
    p = np.linspace(0, 1, 1000)
    theory.prompt_weight(advantage, p, group_size)  # the first call pays for imports and allocations
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        theory.prompt_weight(advantage, p, group_size)
        times.append(1e3 * (time.perf_counter() - start))
    return times


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"1,000-point w(p), table included, one thread, {REPEATS} runs: median (best) in ms")
    for size in (8, 64, 256, 1024):
        for name in ("sage", "grpo", "focal_grpo"):
            times = milliseconds(name, size)
            print(f"  M = {size:4d}  {name:10s} {statistics.median(times):7.2f} ({min(times):.2f})")
