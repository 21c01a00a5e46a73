"""Where a recorded number comes from: command, versions, kind of hardware. No host, user or folder name."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

import sage_lite
from sage_lite.device import cpu_count, pick_device


def made_by(command: str) -> dict[str, Any]:
    """What a recorded run says about its making, for summary files and data/runs/."""
    device = pick_device()
    cpu = f"{cpu_count()} CPU cores, {platform.machine()}"
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    packages = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions = {"sage_lite": sage_lite.__version__, "python": platform.python_version(), **packages}
    return {"command": command, "versions": versions, "hardware": chip, "threads": torch.get_num_threads()}
