"""Where the embedded files lie: the tiny model, small data sets, recorded runs, the claims, and the notebooks."""

from __future__ import annotations

from pathlib import Path

from sage_lite.errors import UserError

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    """A wheel carries the checkout's top-level folder `name` inside the package, as `_name`."""
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise UserError(f"no folder {name!r} in or beside the sage_lite package: reinstall it, or use a whole checkout")


def data_path(*parts: str) -> Path:
    """Path of a file or folder of the top-level `data/`, in a checkout and in an installed wheel alike.

    parts: the names below `data/`, as in `data_path("runs", "demo.jsonl")`. Whether it exists is not checked.
    Raises UserError when there is no data folder at all.
    """
    return _folder("data").joinpath(*parts)


def notebook_path(*parts: str) -> Path:
    """Path below the top-level `notebooks/`; the same rules as `data_path`."""
    return _folder("notebooks").joinpath(*parts)
