"""The notebooks' set-up cell in a bare kernel: a fresh environment without sage_lite, a stubbed google.colab, a local
git address, and no network."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import venv
import zipfile
from pathlib import Path

import nbformat
import numpy
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from run_notebooks import SETUP_CELL

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
VERSIONS = "import importlib.metadata as m; print(*(m.version(n) for n in ('torch', 'numpy')))"
ORIGIN = "import sage_lite; print(sage_lite.__file__)"


class Machine:
    """A fresh Python environment that has what this one has, except sage_lite, and runs notebook cells in a kernel."""

    def __init__(self, folder: Path):
        self.folder, self.work = folder, folder / "content"
        self.work.mkdir()
        packages = folder / "packages"
        packages.mkdir()
        for entry in Path(site.getsitepackages()[0]).iterdir():
            if "sage_lite" not in entry.name:
                (packages / entry.name).symlink_to(entry)
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self.own = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        (self.own / "shared.pth").write_text(str(packages))
        kernel = folder / "jupyter" / "kernels" / "bare"
        kernel.mkdir(parents=True)
        argv = [str(self.python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "bare", "language": "python"}))

    def stub_colab(self) -> None:
        (self.own / "google" / "colab").mkdir(parents=True)
        (self.own / "google" / "colab" / "__init__.py").touch()

    def run(self, *cells: str, **environment: str) -> list[str]:
        """What each cell printed."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        client = NotebookClient(notebook, timeout=120, kernel_name="bare", resources={"metadata": {"path": self.work}})
        # pip offline: nothing is downloaded, and the build uses the hatchling that is here
        # (pip stores --no-build-isolation as "build isolation: 0")
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        client.execute(env={**os.environ, **offline, **environment})
        return ["".join(o.text for o in cell.outputs if o.get("name") == "stdout").strip() for cell in notebook.cells]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return machine


@pytest.fixture
def git_copy(tmp_path, repository) -> Path:
    """This checkout, as it is now, in a git repository of its own."""
    copy = tmp_path / "remote"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("sage_lite", "data", "notebooks"):
        shutil.copytree(repository / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy)
    commit(copy)
    return copy


def commit(folder: Path) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "--no-verify", "-m", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


def test_colab_installs_from_git_and_can_be_rerun(machine, git_copy):
    machine.stub_colab()
    before, banner, again, origin, after = machine.run(
        VERSIONS, SETUP_CELL, SETUP_CELL, ORIGIN, VERSIONS, SAGE_LITE_SOURCE=f"git+file://{git_copy}"
    )
    assert before == after
    assert banner.startswith("sage_lite ") and again.startswith("sage_lite ")
    assert Path(origin).is_relative_to(machine.own)
    installed = {entry.name for entry in machine.own.iterdir()}
    assert not {"torch", "numpy"} & installed
    assert (machine.own / "sage_lite" / "_data").is_dir()


def test_colab_install_never_exchanges_numpy(machine, git_copy, tmp_path):
    """A release that asks for a newer numpy, and an index that has one: the cell stops, numpy stays."""
    machine.stub_colab()
    wheel = tmp_path / "wheels" / "numpy-900.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("numpy/__init__.py", "")
        archive.writestr("numpy-900.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: numpy\nVersion: 900.0\n")
        archive.writestr("numpy-900.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("numpy-900.0.dist-info/RECORD", "")
    project = git_copy / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(text.replace('"numpy>=1.26"', '"numpy>=900"'), encoding="utf-8")
    assert "numpy>=900" in project.read_text(encoding="utf-8")
    commit(git_copy)
    with pytest.raises(CellExecutionError) as stopped:
        machine.run(SETUP_CELL, SAGE_LITE_SOURCE=f"git+file://{git_copy}", PIP_FIND_LINKS=str(wheel.parent))
    assert stopped.value.ename == "RuntimeError"
    assert "depends on numpy>=900" in stopped.value.evalue
    assert f"(constraint) numpy=={numpy.__version__}" in stopped.value.evalue
    assert not list(machine.own.glob("numpy*"))


def test_checkout_around_the_notebook_is_used(machine, repository):
    machine.work = repository / "notebooks"
    banner, origin = machine.run(SETUP_CELL, ORIGIN)
    assert banner.startswith("sage_lite ")
    assert Path(origin) == repository / "sage_lite" / "__init__.py"


def test_elsewhere_the_error_shows_the_command(machine):
    with pytest.raises(CellExecutionError) as stopped:
        machine.run(SETUP_CELL)
    assert stopped.value.evalue == "No module named 'sage_lite'"
    assert "not found? pip install git+" in stopped.value.traceback


def test_installed_library_is_preferred_to_a_checkout(machine, repository):
    (machine.own / "sage_lite").symlink_to(repository / "sage_lite")
    other = machine.work / "sage_lite"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    machine.work = machine.work / "notebooks"
    machine.work.mkdir()
    (origin,) = machine.run(f"{SETUP_CELL}\n{ORIGIN}")
    assert str(machine.own / "sage_lite") in origin


def test_setup_cell_needs_no_magic_and_stays_short():
    compile(SETUP_CELL, "setup_cell", "exec")
    assert len(SETUP_CELL.splitlines()) <= 30
