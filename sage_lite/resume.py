"""How a run can end and go on: its folder begun or resumed, its checkpoints, and signals as a request to stop."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sage_lite import checkpoint, folders
from sage_lite.config import FREE
from sage_lite.errors import Diverged, UserError
from sage_lite.policy import Policy


def prepare_folder(
    config: Any,
    out: Path | None,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    data: dict[str, Any] | None = None,
) -> int:
    """Begin or resume the run in the folder `out`, which is held (`folders.run_folder`); returns the steps done.

    data: what config.json shall say of the training data besides; a resumed run must have the same.
    """
    if out is None:
        return 0
    settings = json.loads(json.dumps({**dataclasses.asdict(config), **(data or {})}, default=str))
    if not config.resume:
        checkpoint.check_space(out, policy, config.keep_checkpoints)
        with folders.writing(out):
            (out / "config.json").write_text(json.dumps(settings, indent=1))
        return 0
    try:
        before = json.loads((out / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot resume {out}: its config.json is missing or damaged; put it back") from error
    changed = [k for k in settings if k not in FREE and k in before and before[k] != settings[k]]
    if config.schedule != "constant" and before.get("steps") != settings["steps"]:
        changed.append("steps")
    if changed:
        k = changed[0]
        raise UserError(f"cannot resume {out} as another run: {k} was {before.get(k)!r} and is now {settings[k]!r}")
    found = folders.latest(out / "checkpoints")
    return int(checkpoint.load_checkpoint(found, policy, optimizer)["step"])


class Saver:
    """Writes a run's checkpoints: every so many steps, at its end, and, when a step fails, of the step before it."""

    def __init__(self, config: Any, out: Path | None, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        self.folder = None if out is None else out / "checkpoints"
        self.every, self.keep, self.policy, self.optimizer = (
            config.checkpoint_every, config.keep_checkpoints, policy, optimizer
        )  # fmt: skip
        self.unsaved: tuple[int, dict[str, Any]] | None = None

    def done(self, step: int, state: dict[str, Any], last: bool) -> None:
        """`step` is done: write it if its turn has come or it is the `last`. Diverged where weights are not finite."""
        checkpoint.check_finite(self.policy, step, self.folder)
        self.unsaved = (step, state)
        if last or step % self.every == 0:
            self._write()

    @contextmanager
    def rescue(self, step: int) -> Iterator[None]:
        """Around the part of `step` that changes nothing yet: if it fails, the steps before it are saved."""
        try:
            yield
        except Diverged as error:  # not worth keeping, and it would take the place of a better one
            raise Diverged(f"step {step}: {error}. {checkpoint.last_whole(self.folder)}") from error
        except Exception:
            try:
                saved = self._write()
            except UserError as error:
                warnings.warn(f"step {step} failed, and {error}", stacklevel=3)
            else:
                if saved is not None:
                    warnings.warn(f"step {step} failed; all before it is saved in {saved}: go on with resume",
                                  stacklevel=3)  # fmt: skip
            raise

    def _write(self) -> Path | None:
        if self.folder is None or self.unsaved is None:
            return None
        step, state = self.unsaved
        saved = checkpoint.save_checkpoint(self.folder, step, self.policy, self.optimizer, state, self.keep)
        self.unsaved = None
        return saved


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one ends the process as usual.

    Off the main thread, where signals cannot be caught, it is never set.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python

    def ask_to_stop(*_: Any) -> None:
        event.set()
        restore()

    for number in previous:
        signal.signal(number, ask_to_stop)
    try:
        yield event
    finally:
        restore()
