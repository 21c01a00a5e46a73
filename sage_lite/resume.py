"""A run's folder, begun or gone on with, and Ctrl-C as a request to stop after the step."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sage_lite import checkpoint
from sage_lite.config import FREE
from sage_lite.errors import UserError
from sage_lite.policy import Policy


def prepare_folder(config: Any, out: Path | None, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Make or resume the run's folder; returns the number of steps already done."""
    if out is None:
        return 0
    settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to the folder {out} ({error.strerror}): choose another out folder") from error
    found = checkpoint.latest(out / "checkpoints")
    if not config.resume:
        if found is not None:
            raise UserError(
                f"{out} already holds a run up to {found.name}: set resume to go on with it, or choose another folder"
            )
        checkpoint.check_space(out, policy, config.keep_checkpoints)
        (out / "config.json").write_text(json.dumps(settings, indent=1))
        return 0
    if found is None:
        raise UserError(f"nothing to resume: there is no checkpoint in {out / 'checkpoints'}")
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
    return int(checkpoint.load_checkpoint(found, policy, optimizer)["step"])


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual. Off the main thread it is never set."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def ask_to_stop(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, ask_to_stop)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
