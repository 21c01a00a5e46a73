"""Exercises: solutions pass, stubs and typical mistakes fail with a helpful line, notebooks show what is registered."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
import torch

from sage_lite import exercises
from sage_lite.errors import UserError
from sage_lite.exercises import NotYet, agree, check, expect, text, verdict

ALL = exercises.all_exercises()
NOTEBOOKS = sorted(Path(__file__).resolve().parent.parent.glob("notebooks/[0-9][0-9]_*.ipynb"))
each = pytest.mark.parametrize("task", ALL, ids=[task.id for task in ALL])
WRONG = [(task, answer, fragment) for task in ALL for answer, fragment in task.wrong]


# -- every exercise ------------------------------------------------------------------------------------------------


@each
def test_the_solution_passes(task):
    assert verdict(task.id, task.solution) == (True, f"right: {task.id} {task.title}")


@each
def test_the_stub_is_not_done(task):
    right, line = verdict(task.id, task.stub)
    assert not right and line.startswith(f"not done yet: {task.id}")


@pytest.mark.parametrize(("task", "answer", "fragment"), WRONG, ids=[f"{w[0].id}-{w[2]}" for w in WRONG])
def test_a_typical_wrong_answer_gets_its_message(task, answer, fragment):
    right, line = verdict(task.id, answer)
    assert not right and line.startswith("not yet: ") and fragment in line and "\n" not in line


@each
def test_a_constant_is_not_an_answer(task):
    for constant in (0, 1.0, torch.zeros(8), "text", [1, 2]):
        answer = (lambda *_, **__: constant) if callable(task.solution) else constant  # noqa: B023
        right, line = verdict(task.id, answer)
        assert not right and line.startswith("not yet: ")


@each
def test_it_is_described_and_has_typical_mistakes(task):
    assert re.fullmatch(r"\d\d\.\d", task.id) and 1 <= task.difficulty <= 3 and 1 <= task.minutes <= 60
    assert task.title and len(task.wrong) >= 2


# -- in the notebooks ----------------------------------------------------------------------------------------------


def _tasks(path: Path) -> list[exercises.Exercise]:
    return [task for task in ALL if task.id.startswith(path.name[:2] + ".")]


def test_each_registered_exercise_has_a_notebook():
    assert {task.id[:2] for task in ALL} <= {path.name[:2] for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_shows_its_exercises(path):
    tasks = _tasks(path)
    if path.name[:2] in ("01", "02", "03"):
        assert len(tasks) >= 4
    notebook = nbformat.read(path, as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert re.findall(r"^### Exercise .*$", prose, re.M) == [task.heading for task in tasks]
    found = [(re.search(r'^check\("([\d.]+)", (\w+)\)', cell.source, re.M), cell) for cell in code]
    checks = {match[1]: (match[2], cell) for match, cell in found if match}
    assert sorted(checks) == [task.id for task in tasks]
    imports = _imports(code)
    for task in tasks:
        name, cell = checks[task.id]
        printed = "".join(output.get("text", "") for output in cell.outputs)
        assert printed.startswith(f"not done yet: {task.id}"), "a committed notebook shows the stub"
        shown = re.search(rf"<!-- solution {re.escape(task.id)} -->\s*```python\n(.*?)```", prose, re.S)
        assert shown, f"no solution of {task.id} in a <details>"
        scope: dict = {}
        exec(imports + shown[1], scope)  # the repository's own text
        assert verdict(task.id, scope[name]) == (True, f"right: {task.id} {task.title}")


def _imports(code) -> str:
    """The import statements of a notebook's cells; the set-up cell, which only finds sage_lite, aside."""
    found = [node for cell in code[1:] for node in ast.parse(cell.source).body
             if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join(map(ast.unparse, found)) + "\n"


# -- the framework -------------------------------------------------------------------------------------------------


@pytest.fixture
def doubling():
    """A toy exercise; gone after the test."""

    @exercises.exercise("00.1", "Double it", difficulty=2, minutes=3, solution=lambda r: r * 2)
    def _(answer):
        agree(answer, lambda r: r * 2, [(torch.arange(4.0),), (torch.ones(2, 2),)], names=["r"],
              mistakes={"you halved": lambda r: r / 2})

    yield "00.1"
    del exercises._REGISTRY["00.1"]


@pytest.mark.parametrize(("answer", "line"), [
    (lambda r: r * 2, "right: 00.1 Double it"),
    (lambda r: ..., "not done yet: 00.1 Double it"),
    (lambda r: None, "not done yet: 00.1 Double it (your function returns None: is a `return` missing?)"),
    (None, "not done yet: 00.1 Double it"),
    (..., "not done yet: 00.1 Double it"),
    (lambda r: r / 2, "not yet: you halved; expected [0, 2, 4, 6], got [0, 0.5, 1, 1.5] for r = [0, 1, 2, 3]"),
    (lambda r: r + 1, "not yet: expected [0, 2, 4, 6], got [1, 2, 3, 4] for r = [0, 1, 2, 3]"),
    (lambda r: r.sum(), "not yet: expected shape (4,), got () for r = [0, 1, 2, 3]"),
    (lambda r: torch.tensor([0.0, 2.0, 4.0, 6.0]), "not yet: expected shape (2, 2), got (4,) for r = [[1, 1], [1, 1]]"),
    (lambda r: r * float("nan"), "not yet: expected [0, 2, 4, 6], got [nan, nan, nan, nan] for r = [0, 1, 2, 3]"),
    (lambda r: "six", "not yet: expected numbers, got 'six' for r = [0, 1, 2, 3]"),
    (lambda r: 1 / 0, "not yet: your function raised ZeroDivisionError: division by zero for ([0, 1, 2, 3])"),
    (torch.ones(4), "not yet: give the function itself, not a value of it; got [1, 1, 1, 1]"),
])
def test_check_prints_one_helpful_line(doubling, answer, line, capsys):
    assert check(doubling, answer) is None  # a value would show under the line in a notebook
    assert capsys.readouterr().out == line + "\n"


def test_a_function_that_changes_its_input_spoils_nothing(doubling):
    assert verdict(doubling, lambda r: r.mul_(2))[0]


def test_a_fault_of_the_checker_is_a_line_too(doubling):
    @exercises.exercise("00.1", "Broken", difficulty=1, minutes=1, solution=1.0)
    def _(answer):
        raise RuntimeError("odd\nanswer")

    assert verdict(doubling, 1.0) == (False, "not yet: your answer cannot be checked (RuntimeError: odd answer)")


def test_a_value_may_be_the_answer(doubling):
    @exercises.exercise("00.1", "A number", difficulty=1, minutes=1, solution=0.25)
    def _(answer):
        expect(answer, 0.25, "the share")

    assert exercises.get(doubling).stub is ...
    assert verdict(doubling, 0.25)[0] and verdict(doubling, torch.tensor(0.25))[0]
    assert verdict(doubling, 0.3) == (False, "not yet: the share: expected 0.25, got 0.3")


@pytest.mark.parametrize("id", ["00.9", "99.1", "", "nonsense", 2.1])
def test_an_unknown_exercise_is_the_authors_mistake(id):
    with pytest.raises(UserError, match="there is no exercise"):
        check(id, None)


@pytest.mark.parametrize(("value", "line"), [
    (1.0, "1"), (0.123456, "0.1235"), (-0.0, "0"), (float("inf"), "inf"), (True, "True"), ("x y", "'x y'"),
    (torch.tensor([[1.0, 2.5], [0.0, -1.0]]), "[[1, 2.5], [0, -1]]"),
    (list(range(20)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, … 20 in all]"),
    ([None, 1.0], "[None, 1.0]"), (object, "<class 'object'>"),
])
def test_values_are_shown_shortly(value, line):
    assert text(value) == line


def test_expect_is_strict_about_shape_and_nan():
    expect([1.0, float("nan")], torch.tensor([1.0, float("nan")]), "same")
    for wrong in (1.0, [1.0, 2.0], [float("nan"), 1.0], [[1.0, float("nan")]], None, "1"):
        with pytest.raises(NotYet, match="^here: "):
            expect(wrong, [1.0, float("nan")], "here")
