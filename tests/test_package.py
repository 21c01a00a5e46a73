"""The package as such: what an import costs, what a wheel carries, and that commands, pins and addresses agree."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sage_lite
from sage_lite.data import data_path
from sage_lite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USED_LATE = (
    "bitsandbytes", "datasets", "ipywidgets", "lm_eval", "math_verify", "matplotlib", "nbval", "pytest",
    "reasoning_gym", "rouge_score", "trl", "unsloth", "verl",
)  # fmt: skip
HEAVY = {"torch", "transformers", "matplotlib", "scipy", "datasets", "ipywidgets"}


@pytest.fixture(scope="module")
def project(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def pins(repository: Path) -> list[Requirement]:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def python(*arguments: str, **options) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy():
    loaded = python("-c", "import sage_lite, sys; print(*sys.modules)").split()
    assert "sage_lite" in loaded
    assert not HEAVY & set(loaded)


def test_submodules_are_attributes_and_import_without_what_they_use_late():
    """A broken bitsandbytes or a missing matplotlib costs what needs it, not the whole library."""
    code = f"import sys; sys.modules.update(dict.fromkeys({USED_LATE!r})); import sage_lite\n"
    code += "print(*(getattr(sage_lite, name).__name__ for name in sage_lite.__all__))"
    assert python("-c", code).split() == [f"sage_lite.{name}" for name in sage_lite.__all__]


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'advantage'"):
        sage_lite.advantage
    assert "advantages" in dir(sage_lite)


def test_version_has_one_source(project):
    assert importlib.metadata.version("sage-lite") == sage_lite.__version__
    assert "version" in project["dynamic"]


def test_data_path_in_a_checkout(repository: Path):
    assert data_path("runs", "x.jsonl") == repository / "data" / "runs" / "x.jsonl"


def test_no_data_folder_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setattr("sage_lite.data._PACKAGE", tmp_path / "sage_lite")
    with pytest.raises(UserError, match="no folder 'data'.*reinstall"):
        data_path()


@pytest.fixture(scope="module")
def installed_wheel(repository: Path, tmp_path_factory) -> Path:
    """A folder into which a wheel of this checkout was built and unpacked, without the network."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    offline = ["-q", "--no-index", "--no-deps", "--disable-pip-version-check"]
    python("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(repository))
    python("-m", "pip", "install", *offline, "--target", str(site), str(next(wheels.glob("*.whl"))))
    return site


def test_wheel_carries_data_and_notebooks(installed_wheel: Path, repository: Path):
    code = f"import sys; sys.path.insert(0, {str(installed_wheel)!r})\n"
    code += "from sage_lite.data import data_path, notebook_path; print(data_path(), notebook_path(), sep='\\n')"
    found = python("-I", "-c", code, cwd=installed_wheel).splitlines()
    for name, folder in zip(("data", "notebooks"), map(Path, found)):
        assert folder.parent == installed_wheel / "sage_lite"
        assert files(folder) == files(repository / name)


def files(folder: Path) -> set[str]:
    kept = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(p) for p in kept if not {"__pycache__", ".ipynb_checkpoints"} & set(p.parts)}


def pins_for(python_version: str, pins: list[Requirement]) -> list[Requirement]:
    return [pin for pin in pins if not pin.marker or pin.marker.evaluate({"python_version": python_version})]


def test_constraints_pin_every_direct_dependency_within_its_range(project, pins):
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in project["dependencies"] + extras["test"] + extras["trl"]]
    for python_version in ("3.10", "3.11", "3.13"):
        here = {pin.name: pin for pin in pins_for(python_version, pins)}
        for requirement in (r for r in wanted if r.name != "sage-lite"):
            (pin,) = here[requirement.name].specifier
            assert pin.operator == "==", f"{pin} is not an exact version"
            assert "+" not in pin.version, f"{pin} exists only in one build"
            assert requirement.specifier.contains(pin.version), f"{requirement.name}: {pin} is outside {requirement}"


def test_each_package_is_pinned_once_for_a_python_version(pins):
    for python_version in ("3.10", "3.11"):
        names = [pin.name for pin in pins_for(python_version, pins)]
        assert sorted(names) == sorted(set(names))


def test_readme_and_ci_run_the_same_commands(repository: Path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    ci = (repository / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt -e . && sage-lite demo" in readme
    test_command = 'pip install -c constraints.txt -e ".[test]" && pytest'
    assert test_command in readme
    assert test_command in ci.splitlines()


def test_one_repository_address_everywhere(repository: Path, project):
    """Colab badges and install commands come from pyproject.toml's address."""
    address = project["urls"]["Repository"]
    owner_and_name = address.removeprefix("https://github.com/")
    badge = r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/main/([\w./-]+)"
    notebooks = (repository / "notebooks").glob("*.ipynb")
    for path in (repository / "README.md", repository / "tests" / "setup_cell.py", *notebooks):
        text = path.read_text(encoding="utf-8")
        for git in re.findall(r"git\+(https?://[\w./-]+)", text):
            assert git == address, f"{path.name} installs from {git}"
        for repo, file in re.findall(badge, text):
            assert repo == owner_and_name, f"{path.name}: badge to {repo}"
            assert (repository / file).is_file(), f"{path.name}: badge to {file}, which is not there"


def test_licence_is_the_whole_apache_text(repository: Path):
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
