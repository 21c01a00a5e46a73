"""The report of `sage-lite doctor`, and the device it describes."""

from __future__ import annotations

import getpass
import importlib.abc
import platform
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

from sage_lite import device, doctor
from sage_lite.errors import UserError


class Refuse(importlib.abc.MetaPathFinder):
    """Lets the import of one package fail with a given error."""

    def __init__(self, package: str, error: Exception):
        self.package, self.error = package, error

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            raise self.error


def break_import(monkeypatch, package: str, error: Exception) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse(package, error), *sys.meta_path])


def fake_gpu(monkeypatch, capability: tuple[int, int] = (7, 5), gib: int = 15, name: str = "Tesla T4") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (gib * 2**30 // 2, gib * 2**30))


def test_report_names_versions_device_and_number_format():
    report = doctor.report()
    for text in ("sage_lite", platform.python_version(), torch.__version__.split("+")[0], "peft", "GiB"):
        assert text in report
    assert re.search(r"cpu, \d+ cores?, .* computes in float32", report)


def test_report_can_be_pasted_without_naming_user_host_or_folders():
    report = doctor.report()
    assert str(Path.home()) not in report.split() and str(Path.cwd()) not in report
    assert socket.gethostname() not in report.split()
    assert getpass.getuser() not in report.split()
    assert not re.search(r"(^|\s)(/|[A-Z]:\\)\w", report), "an absolute path"


def test_broken_bitsandbytes_is_a_line_not_a_crash(monkeypatch):
    break_import(monkeypatch, "bitsandbytes", OSError("/home/ann/lib/libbnb.so: cannot open shared object file"))
    report = doctor.report()
    assert "importing bitsandbytes fails (OSError: …/libbnb.so: cannot open shared object file)" in report
    assert "/home/ann" not in report
    assert "notebooks on this machine" in report


def test_broken_torch_is_a_line_not_a_crash(monkeypatch):
    monkeypatch.delitem(sys.modules, "sage_lite.device")
    break_import(monkeypatch, "torch", ImportError("libtorch_cpu.so: undefined symbol"))
    assert "torch cannot be imported (ImportError: libtorch_cpu.so: undefined symbol)" in doctor.report()
    assert "torch cannot be imported" in doctor.notebook_banner()


def test_missing_optional_part_names_the_extra_that_brings_it(monkeypatch):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("trl", "bitsandbytes") else version(name))
    report = doctor.report()
    assert "pip install 'sage-lite[trl]'" in report
    assert "bitsandbytes is not installed; everything else works without it" in report


def test_extras_exist(repository):
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.findall(r"^(\w+) = \[", text, flags=re.MULTILINE)
    assert set(doctor.EXTRAS.values()) <= set(declared)


def test_main_prints_the_report(capsys):
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.startswith("sage-lite doctor\n")


def test_every_notebook_has_a_row(repository):
    names = {path.stem for path in (repository / "notebooks").glob("*.ipynb")}
    assert set(doctor.notebook_modes()) == names
    assert names <= set(doctor.NOTEBOOKS)


@pytest.fixture
def two_notebooks(monkeypatch, tmp_path):
    for name in ("01_weighting_curve", "05_qwen25_lora_4bit"):
        (tmp_path / f"{name}.ipynb").write_text("{}")
    monkeypatch.setattr(doctor, "notebook_path", lambda: tmp_path)


def test_modes_without_a_gpu(monkeypatch, two_notebooks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    modes = doctor.notebook_modes()
    assert modes["01_weighting_curve"] == "runs whole on the CPU"
    start = "runs on the CPU with the embedded model; a CUDA GPU with 12 GiB runs Qwen2.5-1.5B"
    assert modes["05_qwen25_lora_4bit"].startswith(start)


@pytest.mark.parametrize(("gib", "mode"), [(15, "runs on the GPU: Qwen2.5-1.5B"), (8, "runs on the CPU")])
def test_modes_follow_the_gpu_memory(monkeypatch, two_notebooks, gib, mode):
    fake_gpu(monkeypatch, gib=gib)
    assert doctor.notebook_modes()["05_qwen25_lora_4bit"].startswith(mode)


def test_banner_names_only_the_open_notebook(monkeypatch, two_notebooks):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert "01_weighting_curve" in doctor.notebook_banner() and "05_qwen25" in doctor.notebook_banner()
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/course/01_weighting_curve.ipynb")
    banner = doctor.notebook_banner()
    assert banner.splitlines()[-1] == "01_weighting_curve: runs whole on the CPU"
    assert "05_qwen25" not in banner and "/home/ann" not in banner


def test_a_t4_computes_in_float16_and_an_a100_in_bfloat16(monkeypatch):
    fake_gpu(monkeypatch)
    # torch says yes to bfloat16 on a T4, because it can emulate it: that must not decide.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert device.best_dtype() == torch.float16
    assert "Tesla T4, compute capability 7.5, 15.0 GiB (7.5 free), computes in float16" in doctor.report()
    fake_gpu(monkeypatch, capability=(8, 0))
    assert device.best_dtype("cuda:0") == torch.bfloat16
    assert device.best_dtype("cpu") == torch.float32


def test_pick_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device.pick_device() == torch.device("cpu") == device.pick_device("cpu")
    with pytest.raises(UserError, match="'cuda' asked for, but torch .* sees 0 CUDA GPUs"):
        device.pick_device("cuda")
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        device.pick_device("gpu")
    fake_gpu(monkeypatch)
    assert device.pick_device() == torch.device("cuda", 0)
    with pytest.raises(UserError, match="'cuda:1'"):
        device.pick_device("cuda:1")


def test_memory_respects_a_container_limit(monkeypatch):
    whole = device.memory("cpu")
    assert 2**28 < whole.total < 2**50 and (whole.available is None or whole.available <= whole.total)
    monkeypatch.setattr(device, "_cgroup_bytes", {"memory.max": 2**28, "memory.current": 2**26}.get)
    assert device.memory("cpu") == device.Memory(total=2**28, available=2**28 - 2**26)
