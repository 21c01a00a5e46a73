"""Run notebooks and save them with their outputs, in the form that the repository keeps.

    python tests/run_notebooks.py notebooks/01_weighting_curve.ipynb [more.ipynb …]

The first code cell is replaced by tests/setup_cell.py, all cells run in a fresh kernel, and what differs between two
runs for no good reason (timestamps, widget state, the Python version) is removed. A cell that fails stops the run, and
the file is left as it was.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SETUP_CELL = Path(__file__).with_name("setup_cell.py").read_text(encoding="utf-8").strip()
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT_CELL_METADATA = ("tags", "jupyter", "collapsed")


def run(path: Path) -> float:
    """Execute one notebook in place; returns the seconds it took. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    next(cell for cell in notebook.cells if cell.cell_type == "code").source = SETUP_CELL
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    client = NotebookClient(
        notebook,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
    )
    start = time.perf_counter()
    client.execute(env={**os.environ, "JPY_SESSION_NAME": path.name})  # as in Jupyter: the banner names the notebook
    seconds = time.perf_counter() - start
    normalise(notebook)
    nbformat.write(notebook, path)
    return seconds


def normalise(notebook: nbformat.NotebookNode) -> None:
    """Counts 1..n, no empty cells, no widget state, no metadata but tags, Python's version left out."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type != "code" or cell.source.strip()]
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: cell.metadata[k] for k in KEPT_CELL_METADATA if k in cell.metadata})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if "data" in output:
                output.data.pop("application/vnd.jupyter.widget-view+json", None)
    nbformat.validate(notebook)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for argument in sys.argv[1:]:
        print(f"{run(Path(argument).resolve()):6.1f} s  {argument}", flush=True)
