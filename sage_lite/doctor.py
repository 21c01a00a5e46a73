"""What this machine is and what it can run: the report of `sage-lite doctor` and the notebooks' set-up line.

Nothing here may fail because something else is broken: a package that cannot be imported is a line of the report.
No user, host or folder name is printed, so that a report can be pasted into an issue as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import sage_lite
from sage_lite.data import notebook_path
from sage_lite.errors import UserError

CORE = ("torch", "transformers", "peft", "datasets", "bitsandbytes", "numpy", "scipy", "matplotlib", "ipywidgets")
EXTRAS = {"trl": "trl", "unsloth": "unsloth", "verl": "verl", "lm-eval": "eval", "nbval": "test"}  # package: extra


@dataclass(frozen=True)
class Notebook:
    """How a notebook runs on a CPU, and what a CUDA GPU with `gpu_gib` GiB of memory runs instead ("" for the same)."""

    cpu: str = "runs whole on the CPU"
    gpu: str = ""
    gpu_gib: float = 0.0


NOTEBOOKS = {
    "01_weighting_curve": Notebook(),
    "02_one_line_advantage": Notebook(),
    "03_scalar_rewards": Notebook(),
    "04_countdown_on_a_laptop": Notebook("runs whole on the CPU, with the embedded model"),
    "05_qwen25_lora_4bit": Notebook("runs on the CPU with the embedded model", "Qwen2.5-1.5B in 4-bit with LoRA", 12),
    "07_imagenet_check": Notebook("runs on the CPU with images of three digits", "ResNet-50 on an ImageNet subset", 12),
}


def notebook_modes() -> dict[str, str]:
    """For each notebook that is here: how it will run on this machine."""
    try:
        names = sorted(path.stem for path in notebook_path().glob("[0-9]*.ipynb"))
    except UserError:
        return {}
    gpu_gib = _gpu_gib()
    modes = {}
    for name in names:
        notebook = NOTEBOOKS.get(name, Notebook())
        if notebook.gpu and gpu_gib >= notebook.gpu_gib:
            modes[name] = f"runs on the GPU: {notebook.gpu}"
        elif notebook.gpu:
            modes[name] = f"{notebook.cpu}; a CUDA GPU with {notebook.gpu_gib:g} GiB runs {notebook.gpu}"
        else:
            modes[name] = notebook.cpu
    return modes


def notebook_banner() -> str:
    """Three short lines for a notebook's first cell: versions, device, and how this notebook (or each) runs here."""
    versions = [f"sage_lite {sage_lite.__version__}", f"Python {platform.python_version()}"]
    versions += [f"{name} {_version(name) or 'not installed'}" for name in ("torch", "transformers", "numpy")]
    modes = notebook_modes()
    here = Path(os.environ.get("JPY_SESSION_NAME", "")).stem  # Jupyter's name for the open notebook
    if here in modes:
        modes = {here: modes[here]}
    return "\n".join([", ".join(versions), *_device_lines(), *(f"{name}: {mode}" for name, mode in modes.items())])


def report() -> str:
    """The whole report as text: versions, device, memory, number format, optional parts, notebooks."""
    lines = ["sage-lite doctor", ""]
    lines += _row("sage_lite", sage_lite.__version__)
    lines += _row("python", f"{platform.python_version()} ({platform.python_implementation()})")
    lines += _row("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    for name in CORE:
        lines += _row(name, _version(name) or "missing: install sage-lite again")
    lines += ["", "device", *(f"  {line}" for line in _device_lines()), f"  4-bit weights: {_four_bit()}"]
    lines += ["", "optional parts"]
    for name, extra in EXTRAS.items():
        lines += _row(name, _version(name) or f"not installed: pip install 'sage-lite[{extra}]'")
    lines += ["", "notebooks on this machine"]
    modes = notebook_modes()
    lines += [line for name, mode in modes.items() for line in _row(name, mode, width=26)] or ["  none found"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """`sage-lite doctor`: print the report."""
    print(report())
    return 0


def _row(name: str, value: str, width: int = 14) -> list[str]:
    return [f"  {name:<{width}} {value}"]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_lines() -> list[str]:
    """One line a device: its name, memory, and the format that will be used on it."""
    try:
        import torch

        from sage_lite import device
    except Exception as error:  # whatever a broken torch raises
        return [f"torch cannot be imported ({_short(error)}): reinstall it, nothing that trains runs without it"]
    lines = []
    for index in range(torch.cuda.device_count()):
        name, major_minor = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        gpu = f"cuda:{index} {name}, compute capability {major_minor[0]}.{major_minor[1]}"
        lines.append(f"{gpu}, {_memory_text(device.memory(f'cuda:{index}'))}, {_dtype_text(f'cuda:{index}')}")
    cpu = f"cpu, {_count(device.cpu_count(), 'core')}, {_count(torch.get_num_threads(), 'torch thread')}"
    return [*lines, f"{cpu}, {_memory_text(device.memory('cpu'))}, {_dtype_text('cpu')}"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _dtype_text(name: str) -> str:
    from sage_lite.device import best_dtype

    return f"computes in {str(best_dtype(name)).removeprefix('torch.')}"


def _memory_text(memory) -> str:
    if memory.total is None:
        return "memory unknown"
    free = "" if memory.available is None else f" ({memory.available / 2**30:.1f} free)"
    return f"{memory.total / 2**30:.1f} GiB{free}"


def _gpu_gib() -> float:
    """Memory of the GPU that would be used; 0 without one. Half a GiB is forgiven: a "16 GB" card reports less."""
    try:
        from sage_lite.device import memory, pick_device

        device = pick_device()
        return memory(device).total / 2**30 + 0.5 if device.type == "cuda" else 0.0
    except Exception:  # a broken torch has its own line in the report
        return 0.0


def _four_bit() -> str:
    """Only an import tells whether bitsandbytes works: where its compiled part does not fit, that is what fails."""
    if _version("bitsandbytes") is None:
        return "bitsandbytes is not installed; everything else works without it"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module("bitsandbytes")  # it reports on optional parts of its own
    except Exception as error:  # any kind: a missing library, a CUDA mismatch, a failing check of its own
        return f"importing bitsandbytes fails ({_short(error)}); everything else works without it"
    return "available (bitsandbytes)"


def _short(error: BaseException) -> str:
    """Kind and first line of an error, without the folders it names."""
    first = (str(error).strip().splitlines() or [""])[0]
    first = re.sub(r"(?:[A-Za-z]:)?(?:[\\/][^\s\\/:'\"]+)+[\\/]", "…/", first)
    return f"{type(error).__name__}: {first[:160]}"
