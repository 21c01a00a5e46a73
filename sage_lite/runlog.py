"""What a run writes while it runs: metrics.jsonl, completions.jsonl and the progress bar."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sage_lite.errors import UserError


class _Lines:
    """An append-only JSONL file, flushed after every line; reopened, it drops lines after `last_step` and half
    lines."""

    name = ""

    def __init__(self, folder: Path | None, last_step: int) -> None:
        self.path = None if folder is None else folder / self.name
        if self.path is not None:
            with self._guarded():
                kept = [json.dumps(line) for line in read_lines(self.path) if line["step"] <= last_step]
                partial = self.path.with_suffix(".partial")
                partial.write_text("".join(line + "\n" for line in kept))
                os.replace(partial, self.path)
                self.file = self.path.open("a")

    def __enter__(self):
        return self

    def __exit__(self, *_: Any) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):  # every line was flushed: what is left is one that failed and was told
                self.file.close()

    def append(self, line: dict[str, Any]) -> dict[str, Any]:
        """Write `line`, with null for numbers that are not finite, which JSON does not have; returns it as it was."""
        if self.path is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            with self._guarded():
                self.file.write(json.dumps(finite, allow_nan=False) + "\n")
                self.file.flush()
        return line

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"could not write {self.path} ({error.strerror}): free some space and go on with resume"
            ) from error


class MetricsFile(_Lines):
    """metrics.jsonl: one line a step, numbers with eight significant digits."""

    name = "metrics.jsonl"

    def write(self, line: dict[str, Any]) -> dict[str, Any]:
        return self.append({k: float(f"{v:.8g}") if isinstance(v, float) else v for k, v in line.items()})


class CompletionsFile(_Lines):
    """completions.jsonl: the first group of chosen steps, one line a rollout."""

    name = "completions.jsonl"

    def write(self, step: int, prompt: str, texts: list[str], rewards: torch.Tensor, advantages: torch.Tensor) -> None:
        for text, reward, advantage in zip(texts, rewards[0].tolist(), advantages[0].tolist()):
            reward = None if reward != reward else reward
            self.append(
                {"step": step, "prompt": prompt, "completion": text, "reward": reward, "advantage": round(advantage, 6)}
            )


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, [] where there is none; a last line that was cut short by a kill is left out."""
    path = Path(path)
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


class progress_bar:
    """A tqdm bar that shows reward, pass rate, dead-group share, KL, clip share and tokens a second beside the ETA."""

    def __init__(self, name: str, first: int, steps: int, show: bool) -> None:
        from tqdm.auto import tqdm

        self.bar = tqdm(total=steps, initial=first, desc=name, disable=not show, dynamic_ncols=True, mininterval=0.5)

    def __enter__(self) -> progress_bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.close()

    def show(self, line: dict[str, Any]) -> None:
        shown = {"reward": "reward", "pass_rate": "pass", "dead_groups": "dead", "kl": "KL", "clip_share": "clip"}
        self.bar.set_postfix(
            {s: f"{line[k]:.3f}" for k, s in shown.items()} | {"tok/s": f"{line['tokens_per_s']:.0f}"}, refresh=False
        )
        self.bar.update(1)
