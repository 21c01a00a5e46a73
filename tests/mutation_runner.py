"""Run notebooks and exercise checkers against copies of sage_lite, without Jupyter: test_mutations' worker process.

    python tests/mutation_runner.py jobs.json

A job is a folder with a copy of `sage_lite` and the steps to take: a notebook's number, or "exercises". This process
imports the heavy libraries once and forks a child for each job, which stops at the first thing that fails. Cells are
run by `exec` and compared with their stored outputs as nbval does: stdout, stderr and the text form of what a cell
shows, after the sanitiser. For each job a line of JSON is printed: name, seconds of computing, and where and how it
was caught. An error that says that the fault itself is broken (a name that is gone) is not a catch.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import resource
import sys
import time
import traceback
from pathlib import Path

import nbformat
from IPython.lib.pretty import pretty

ROOT = Path(__file__).resolve().parent.parent
SANITISE = re.findall(
    "^regex: (.*)$\n^replace: (.*)$", (ROOT / "tests" / "nbval_sanitize.cfg").read_text(encoding="utf-8"), re.MULTILINE
)
AT_ONCE = 2
LIMIT = 120  # seconds of computing a job may take; what takes longer counts as not caught
BROKEN = (NameError, AttributeError, ImportError)
IGNORED = "# NBVAL_IGNORE_OUTPUT"


class Caught(Exception):
    """Something failed; the two arguments say where and how."""


def run_cell(source: str, scope: dict) -> dict[str, str]:
    """Execute a cell; what it prints, and the text form of its last expression, by nbval's names of these outputs."""
    body = ast.parse(source).body
    shown = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    out, err, value = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), scope)
        if shown is not None:
            value = eval(compile(ast.Expression(shown.value), "<cell>", "eval"), scope)
        text = "" if value is None else pretty(value)
    outputs = {"stdout": out.getvalue(), "stderr": err.getvalue(), "text/plain": text}
    return {name: sanitise(text) for name, text in outputs.items() if text}


def stored(cell: nbformat.NotebookNode) -> dict[str, str]:
    """A committed cell's outputs in the same form."""
    texts = {o.name: o.text for o in cell.outputs if o.output_type == "stream"}
    texts |= {"text/plain": o.data["text/plain"] for o in cell.outputs if "data" in o}
    return {name: sanitise(text) for name, text in texts.items()}


def sanitise(text: str) -> str:
    for regex, replacement in SANITISE:
        text = re.sub(regex, replacement, text)
    return text


def run_notebook(path: Path) -> None:
    """Caught, at the first cell that raises or shows something else than is stored.

    The set-up cell is left out. Another cell whose output is not compared trains a model: it is the end.
    """
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"][1:]
    scope = {"__name__": "__main__"}
    for number, cell in enumerate(cells, start=2):
        if cell.source.startswith(IGNORED):
            return
        where = f"notebook {path.name[:2]}, cell {number} ({cell.id})"
        try:
            outputs = run_cell(cell.source, scope)
        except BROKEN:
            raise
        except Exception as error:
            how = "assert fails" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise Caught(where, how) from error
        if outputs != stored(cell):
            raise Caught(where, difference(stored(cell), outputs))


def difference(want: dict[str, str], got: dict[str, str]) -> str:
    """The first line in which two cells' outputs differ."""
    pairs = [(name, want.get(name, ""), got.get(name, "")) for name in dict.fromkeys([*want, *got])]
    name, left, right = next((n, a.splitlines(), b.splitlines()) for n, a, b in pairs if a != b)
    for a, b in zip(left, right):
        if a != b:
            return f"{name}: {b.strip()!r} instead of {a.strip()!r}"
    return f"{name}: {len(right)} lines instead of {len(left)}"


def run_exercises() -> None:
    """Caught, at the first exercise whose solution is refused, or where a typical wrong answer passes."""
    from sage_lite.exercises import all_exercises, verdict

    for task in all_exercises():
        right, line = verdict(task.id, task.solution)
        if not right:
            raise Caught(f"exercise {task.id}", f"refuses the solution: {line}")
        for answer, fragment in task.wrong:
            if verdict(task.id, answer)[0]:
                raise Caught(f"exercise {task.id}", f"takes a wrong answer ({fragment})")


def run_job(job: dict) -> dict:
    """Take the steps of a job with its copy of the library."""
    sys.path.insert(0, job["root"])
    import sage_lite

    assert Path(sage_lite.__file__).is_relative_to(job["root"]), f"the library came from {sage_lite.__file__}"
    where = how = ""
    try:
        for step in job["steps"]:
            if step == "exercises":
                run_exercises()
            else:
                run_notebook(next((ROOT / "notebooks").glob(f"{step}_*.ipynb")))
    except Caught as caught:
        where, how = caught.args
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    return {"where": where, "how": " ".join(how.split())[:120], "seconds": round(time.process_time(), 1)}


def start(job: dict) -> tuple[int, int]:
    """Fork a child for the job; its process id, and the pipe's end on which it reports."""
    report, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, report
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        os.write(write, json.dumps(run_job(job)).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(job: dict, report: int, status: int) -> None:
    with os.fdopen(report, "rb") as pipe:
        text = pipe.read()
    result = json.loads(text) if text else {"where": "", "how": f"no report, wait status {status}", "seconds": 0.0}
    print(json.dumps({"name": job["name"], **result}), flush=True)


def main(jobs: list[dict]) -> None:
    # Heavy, and none of them imports sage_lite.
    import ipywidgets  # noqa: F401
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.optimize  # noqa: F401
    import scipy.stats  # noqa: F401
    import sympy  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    torch.set_num_threads(1)
    assert "sage_lite" not in sys.modules
    os.chdir(ROOT / "notebooks")
    running: dict[int, tuple[dict, int]] = {}
    waiting = list(reversed(jobs))
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            job = waiting.pop()
            pid, report = start(job)
            running[pid] = job, report
        pid, status = os.wait()
        finish(*running.pop(pid), status)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
