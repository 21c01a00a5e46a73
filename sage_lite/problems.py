"""The problems that a model is asked: those its own training held out, or all rows of data it was not trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_lite.errors import UserError
from sage_lite.tasks import Task, hub_of, load_task

DIVISION = ("split", "test_size", "pool_size")  # options of load_task that decide which rows are tested


@dataclass(frozen=True)
class Run:
    """A training run: its folder, and the settings in its config.json."""

    folder: Path
    task: str
    data: str | None
    options: dict[str, Any]


def run_of(place: str | Path | None) -> Run | None:
    """The run that a folder is, or that it is a checkpoint of; None for anything else."""
    if place is None or not Path(place).expanduser().is_dir():
        return None
    folder = Path(place).expanduser()
    if folder.absolute().parent.name == "checkpoints":
        folder = (folder if folder.parent.name else folder.absolute()).parent.parent
    file = folder / "config.json"
    if not (folder / "checkpoints").is_dir() or not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text())
        return Run(folder, settings["task"], settings.get("data"), dict(settings.get("task_options") or {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged ({error!r}), so nobody knows what the run was trained on: put it back, or copy a "
            "checkpoint to another place and give that as the model"
        ) from None


def load(
    run: Run | None,
    task: str | None = None,
    data: str | None = None,
    options: dict[str, Any] | None = None,
    *,
    part: str | None = None,
    all_rows: bool = False,
) -> tuple[Task, str]:
    """A task for a model that comes from `run`, or from no run, and which problems these are, in words.

    task, data: None takes those of the run, else "countdown" and what the task generates; options (of `load_task`) go
    over those of the run. Data that the run was trained on is divided as it was there. Other data was never trained on,
    as far as is known: all its rows are taken as `part`, but for an official split, which stays; None divides it, too.
    all_rows takes all rows also where some were trained on. Raises UserError as `load_task`, and where `part` is asked
    for and nothing was held out.
    """
    given, name = options or {}, task or (run.task if run else "countdown")
    of_run = run is not None and name == run.task
    if of_run and data is None:
        data = run.data
    seen = of_run and _same(name, data, run.data)
    kept = {k: v for k, v in run.options.items() if k not in DIVISION or (seen and not all_rows)} if of_run else {}
    whole = part is not None and (all_rows or (data is not None and not seen))
    settings = ({"split": part} if whole else {}) | kept | given
    try:
        found = load_task(name, data, **settings)
    except TypeError as error:
        raise UserError(f"the task options {settings!r} do not fit the task {name}: {error}") from error
    if whole:
        single = data is None or Path(data).expanduser().is_file()
        about = "all rows" if single else f"all rows, or the official {part} part where there is one"
        if run is not None:
            trained = "this data" if seen else f"{run.data or 'generated problems'} ({run.task})"
            about += f"; {run.folder} was trained on {trained}"
        return found, about
    if not seen:
        return found, f"the {part or 'test'} part"
    if any(k in given and given[k] != run.options.get(k) for k in (*DIVISION[:2], "seed", "size")):
        return found, f"divided by the given options, not as when {run.folder} was trained on this data"
    if part == "train":
        return found, f"those that {run.folder} was trained on"
    if part is not None and not found.test:
        raise UserError(
            f"the run in {run.folder} was trained on all rows of {found.source}, so none was held out: "
            "take other --data, or --all-rows for those it was trained on"
        )
    return found, f"held out when {run.folder} was trained"


def _same(name: str, data: str | None, trained: str | None) -> bool:
    """Whether two places hold the same data; a file that is no longer where it was is known by its name."""
    if data is None or trained is None:
        return data is trained
    data, trained = (hub_of(name) if place == "hub" else place for place in (data, trained))
    here, there = Path(data).expanduser(), Path(trained).expanduser()
    if here.exists() and there.exists():
        return here.samefile(there)
    return here.name == there.name if here.exists() else data == trained
