"""The machine: which device to compute on, the number format it does well, and how much memory it has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import deterministic

from sage_lite.errors import UserError


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory; None where the system does not tell."""

    total: int | None
    available: int | None


def pick_device(name: str | torch.device | None = None) -> torch.device:
    """The device to use: `name` if given, else the first CUDA GPU, else the CPU.

    Apple's `mps` is used only when asked for: 4-bit loading does not run there.
    Raises UserError for a name that is no device, and for a GPU that is not there.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown device {name!r}: use 'cpu', 'cuda' or 'cuda:0'") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise UserError(f"device {name!r} asked for, but torch {torch.__version__} sees {seen} CUDA GPUs")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device 'mps' asked for, but this torch has no working Apple GPU support")
    return device


def best_dtype(device: str | torch.device | None = None) -> torch.dtype:
    """The format for weights and activations: bfloat16 where the GPU has it, float16 on older GPUs, float32 elsewhere.

    Decided by compute capability (8.0, Ampere, is the first with bfloat16): `torch.cuda.is_bf16_supported()` also says
    yes where bfloat16 is only emulated, as on a T4, which has fast float16.
    """
    device = pick_device(device)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


@contextmanager
def fixed_order(device: torch.device) -> Iterator[None]:
    """On a CPU, sums of several threads in a fixed order, so that a seed gives the same numbers at every run.

    A GPU is left alone: some of its kernels have no such form. The numbers still depend on the number of threads, the
    processor and torch's version.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = False  # only there to find reads of empty memory, and slow
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


def memory(device: str | torch.device | None = None) -> Memory:
    """Total and available bytes of a device: a GPU's own memory, or this process's share of the machine's."""
    device = pick_device(device)
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        return Memory(total, available)
    return _host_memory()


def cpu_count() -> int:
    """Number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_memory() -> Memory:
    try:
        total: int | None = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return Memory(None, None)
    available = None
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        pass
    limit, used = (_cgroup_bytes(name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit < total:  # a container may use less than the machine has
        free = limit - (used or 0)
        total, available = limit, free if available is None else min(free, available)
    return Memory(total, available)


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
