"""How a notebook must be kept. That its cells run and print what is stored is nbval's part (see pyproject.toml)."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from run_notebooks import SETUP_CELL, normalise, run

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(home|root|Users|work|content|mnt|opt|usr|tmp|var)/\w|\b[A-Z]:\\\\?Users")
MAGIC = re.compile(r"^\s*[%!]|^\s*\w+\s*=\s*[%!]|^\s*\?|\?\s*$", re.MULTILINE)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_lines(cell: nbformat.NotebookNode) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def test_readme_lists_the_notebooks_that_exist_with_their_minutes():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- notebooks:begin -->")[1]
    rows = [row for row in table.split("<!-- notebooks:end -->")[0].splitlines() if ".ipynb" in row]
    listed = [re.search(r"\]\(notebooks/([\w.-]+\.ipynb)\)", row).group(1) for row in rows]
    assert listed == [path.name for path in NOTEBOOKS]
    for row in rows:
        assert re.search(r"\|\s*[<≈]?\s*\d+(\.\d+)?\s*\|", row), f"no minutes in {row!r}"


def test_was_run_from_top_to_bottom(notebook):
    cells = code_cells(notebook)
    # nbval compares nothing in a cell without a count
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.source.strip() for cell in cells), "an empty code cell"


def test_outputs_are_stored_and_none_is_an_error(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert outputs, "no outputs"
    errors = [output.ename for output in outputs if output.output_type == "error"]
    assert not errors, f"stored errors: {errors}"


def test_pictures_carry_their_numbers_as_text(notebook):
    """nbval never compares images: a figure's text form must say more than what class it has."""
    for cell in code_cells(notebook):
        for data in (output.data for output in cell.outputs if "data" in output):
            if "image/png" in data:
                assert re.search(r"\d", data.get("text/plain", "")), f"a bare picture from:\n{cell.source}"
                assert not data["text/plain"].startswith("<"), f"{data['text/plain']} from:\n{cell.source}"


def test_metadata_is_clean(notebook):
    assert "widgets" not in notebook.metadata, "saved widget state: GitHub calls such a notebook invalid"
    assert notebook.metadata.kernelspec.name == "python3"
    before = nbformat.writes(notebook)
    normalise(notebook)
    assert before == nbformat.writes(notebook), "save it with tests/run_notebooks.py"


def test_first_code_cell_is_the_setup_cell(notebook):
    assert code_cells(notebook)[0].source == SETUP_CELL


def test_no_magics(notebook):
    """nbval does not see what follows an unknown magic, and a plain Python kernel does not know any."""
    for cell in code_cells(notebook):
        assert not MAGIC.search(cell.source), cell.source
        ast.parse(cell.source)


def test_code_cells_are_short(notebook):
    lengths = [code_lines(cell) for cell in code_cells(notebook)]
    assert statistics.median(lengths) <= 6
    assert max(lengths) <= 30


def test_is_small(path):
    assert path.stat().st_size < 1_500_000


def test_outputs_name_no_folder_of_a_machine(notebook):
    for cell in code_cells(notebook):
        text = nbformat.writes(nbformat.v4.new_notebook(cells=[cell]))
        text = re.sub(r'"image/[\w+]+": "[^"]*"', "", text)  # base64 has slashes of its own
        assert not ABSOLUTE_PATH.search(text), f"{ABSOLUTE_PATH.search(text)} in the output of:\n{cell.source}"


FIGURE = """from sage_lite import plots

figure, axes = plots.new_figure(xlabel="p")
axes.plot([0.0, 0.5, 1.0], [7.0, 1.98438, 1.0], **plots.style("maxrl"))
plots.show(figure)"""


def test_a_curve_that_moves_fails_though_images_are_never_compared(tmp_path):
    """The whole chain on two cells: run_notebooks stores their outputs, nbval passes them and catches a change."""
    same, moved = tmp_path / "same.ipynb", tmp_path / "moved.ipynb"
    cells = [nbformat.v4.new_code_cell("to be replaced"), nbformat.v4.new_code_cell(FIGURE)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"widgets": {"state": {}}}), same)
    run(same)
    stored = nbformat.read(same, as_version=4)
    assert [cell.execution_count for cell in stored.cells] == [1, 2] and "widgets" not in stored.metadata
    assert stored.cells[0].source == SETUP_CELL and stored.cells[0].outputs[0].text.startswith("sage_lite ")
    assert set(stored.cells[1].outputs[0].data) == {"image/png", "text/plain"}
    text = stored.cells[1].outputs[0].data["text/plain"]
    stored.cells[1].outputs[0].data["text/plain"] = text.replace("1.98", "1.99")
    nbformat.write(stored, moved)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", same, moved]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 failed, 3 passed" in done.stdout
    assert "mismatch 'text/plain'" in done.stdout
