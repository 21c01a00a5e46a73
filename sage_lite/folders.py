"""The folder of a run: made and tried before any work, held by one run at a time, and found again by its name."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from sage_lite.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

LOCK = ".lock"
_NAME = re.compile(r"step-(\d{6,})$")


def make(out: str | Path) -> Path:
    """The folder `out`, made if need be, with ~ expanded; UserError if no file can be written there."""
    out = Path(out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"x")
    except OSError as error:
        raise UserError(f"cannot write to the folder {out} ({error.strerror}): choose another out folder") from error
    return out


@contextlib.contextmanager
def run_folder(out: str | Path | None, resume: bool) -> Iterator[Path | None]:
    """The folder of a run, made and held until the run ends, however it ends; None for none.

    Raises UserError when another run holds it, when it already holds checkpoints and `resume` is False, and when there
    is none to resume. A folder that was made here and stays empty is removed again.
    """
    if out is None:
        yield None
        return
    out = Path(out).expanduser()
    if resume and latest(out / "checkpoints") is None:
        raise UserError(f"nothing to resume: there is no checkpoint in {out / 'checkpoints'}")
    is_new = not out.exists()
    with _held(make(out)):
        found = None if resume else latest(out / "checkpoints")
        if found is not None:
            raise UserError(
                f"{out} already holds a run up to {found.name}: set resume to go on with it, or choose another folder"
            )
        try:
            yield out
        finally:
            with contextlib.suppress(OSError):
                if is_new and [f.name for f in out.iterdir()] == [LOCK]:
                    (out / LOCK).unlink()
                    out.rmdir()


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turns errors of the disk while files are written to `out` into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"could not write to {out} ({why}): free some space, or choose another folder") from error


def find(run: str | Path) -> Path:
    """The folder with the weights of a run: its last checkpoint; a folder that is no run is taken as it is."""
    run = Path(run).expanduser()
    if not run.is_dir():
        raise UserError(f"there is no folder {run}")
    if not (run / "checkpoints").is_dir() and not (run / "metrics.jsonl").is_file():
        return run
    last = latest(run / "checkpoints")
    if last is None:
        raise UserError(f"the run in {run} has no checkpoint yet")
    return last


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` whose files are all there at full size, or None; says so when it passes one
    over."""
    for path in reversed(checkpoints(folder)):
        if _is_whole(path):
            return path
        warnings.warn(f"checkpoint {path} is incomplete and is passed over", stacklevel=2)
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, damaged ones included."""
    found = [p for p in folder.glob("step-*") if _NAME.search(p.name)] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(_NAME.search(p.name)[1]))


def _is_whole(path: Path) -> bool:
    try:
        sizes = json.loads((path / "manifest.json").read_text())
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _held(out: Path) -> Iterator[None]:
    """The lock of a folder, where there are locks; the system takes it back from a process that is killed."""
    with writing(out):
        file = (out / LOCK).open("a")
    with file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {out} at this moment: wait for its end, or choose another out folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it to processes forked meanwhile
