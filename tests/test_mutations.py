"""Do the notebooks test the library? Faults are planted in copies of it; cells and exercise checkers must notice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("02", "01", "exercises", "03", "04", "07")


def test_the_faults_fit_the_library():
    """Each text to be replaced stands once in its file, and the result is Python."""
    assert len({fault.name for fault in MUTATIONS}) == len(MUTATIONS)
    stale = []
    for fault in MUTATIONS:
        source = (ROOT / "sage_lite" / fault.file).read_text(encoding="utf-8")
        if source.count(fault.old) != 1:
            stale.append(f"{fault.name}: {fault.file} holds {source.count(fault.old)} times {fault.old!r}")
        compile(source.replace(fault.old, fault.new), fault.file, "exec")
        assert fault.first in STEPS
    assert not stale, "\n".join(stale)


def copy_library(folder: Path, fault: Mutation | None = None) -> None:
    """A copy of the package with the fault in it, beside links to the data and the notebooks that it looks for."""
    shutil.copytree(ROOT / "sage_lite", folder / "sage_lite", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("data", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    if fault is not None:
        file = folder / "sage_lite" / fault.file
        file.write_text(file.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")


@pytest.mark.mutation
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks processes that have imported torch")
def test_every_fault_is_noticed(tmp_path, capsys):
    copy_library(tmp_path / "control")
    jobs = [{"name": step, "root": str(tmp_path / "control"), "steps": [step]} for step in STEPS]
    for number, fault in enumerate(MUTATIONS):
        copy_library(tmp_path / str(number), fault)
        steps = [fault.first, *(step for step in STEPS if step != fault.first)]
        jobs.append({"name": fault.name, "root": str(tmp_path / str(number)), "steps": steps})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")

    start = time.perf_counter()
    command = [sys.executable, str(ROOT / "tests" / "mutation_runner.py"), str(tmp_path / "jobs.json")]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=os.environ | one_thread, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    results = {result["name"]: result for result in map(json.loads, done.stdout.splitlines())}
    for step in STEPS:
        assert not results[step]["how"], f"without any fault: {results[step]['where']}: {results[step]['how']}"

    with capsys.disabled():
        computing = sum(result["seconds"] for result in results.values())
        print(f"\n{len(MUTATIONS)} faults: {time.perf_counter() - start:.0f} s, {computing:.0f} s of computing")
        for fault in MUTATIONS:
            result = results[fault.name]
            print(f"  {fault.name:48} {result['where'] or 'SURVIVED':44} {result['how']}")
    survivors = [fault.name for fault in MUTATIONS if not results[fault.name]["where"]]
    assert not survivors, f"no notebook cell and no exercise noticed: {', '.join(survivors)}\n{done.stderr}"
