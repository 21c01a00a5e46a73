"""Wall clock of a 1,000-point prompt-weight curve, the table included. Run: python tests/benchmarks/bench_theory.py"""
from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from sage_lite import theory

REPEATS = 15


def milliseconds(advantage: str, group_size: int) -> tuple[list[float], list[float]]:
    """Wall-clock and processor time of each run; on a busy machine only the second says what the code costs."""
    p = np.linspace(0, 1, 1000)
    theory.prompt_weight(advantage, p, group_size)  # the first call pays for imports and allocations
    wall, processor = [], []
    for _ in range(REPEATS):
        start, cpu = time.perf_counter(), time.process_time()
        theory.prompt_weight(advantage, p, group_size)
        wall.append(1e3 * (time.perf_counter() - start))
        processor.append(1e3 * (time.process_time() - cpu))
    return wall, processor


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"1,000-point w(p), table included, one thread, {REPEATS} runs: median ms on the wall clock, of processor")
    for size in (8, 64, 256, 1024):
        for name in ("sage", "grpo", "focal_grpo"):
            wall, processor = (statistics.median(times) for times in milliseconds(name, size))
            print(f"  M = {size:4d}  {name:10s} {wall:7.2f} {processor:7.2f}")
