"""Recorded runs of the classifier experiment: what is written of a run, and what a notebook asks of the records.

A record is one JSON line a run: what was run (settings, seed, command, versions, kind of hardware), its curve, and the
test numbers at its end. Curves are means over windows of WINDOW steps. `sage_lite.vision_train` makes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sage_lite
from sage_lite import theory, vision
from sage_lite.device import pick_device
from sage_lite.errors import UserError
from sage_lite.evaluation import Interval, over_seeds
from sage_lite.vision_data import ImageSet
from sage_lite.vision_loop import VisionConfig, VisionResult

WINDOW = 5
SMOOTH = 5  # windows over which the pass rate is averaged, so that a few lucky images are no start
LEFT = 10.0  # a run has left the start when its pass rate is this many times that of guessing
_NOT_RECORDED = {"out", "resume", "progress", "checkpoint_every", "keep_checkpoints", "device", "amp"}


def curve(metrics: Sequence[dict[str, Any]], *, names: Iterable[str] = ("pass_rate", "top1")) -> dict[str, list[float]]:
    """Metrics as means over windows: {"step": the windows' last steps, name: means}; a shorter rest is left out."""
    windows = [metrics[i:i + WINDOW] for i in range(0, len(metrics) - WINDOW + 1, WINDOW)]
    means = {name: [float(np.mean([line[name] for line in window])) for window in windows] for name in names}
    return {"step": [window[-1]["step"] for window in windows],
            **{name: [float(f"{value:.5g}") for value in values] for name, values in means.items()}}


def leaves_at(curve: dict[str, list[float]], classes: int) -> float:
    """The step at which the mean pass rate of the last SMOOTH windows reaches LEFT / classes; infinite if never."""
    p = curve["pass_rate"]
    means = (np.mean(p[max(0, i - SMOOTH + 1):i + 1]) for i in range(len(p)))
    return next((step for step, mean in zip(curve["step"], means) if mean >= LEFT / classes), float("inf"))


def predicted_leave(reference: dict[str, list[float]], advantage: theory.Measurable, rollouts: int,
                    classes: int) -> float:
    """The step at which a method should leave the start, from the curve of a cross-entropy run.

    A method's update is p w(p) times cross-entropy's, so what takes cross-entropy one step at pass rate p takes it
    1 / (p w(p)). That is exact for small steps, no noise and the same p for all images; else it is a first guess.
    Infinite if the reference never leaves.
    """
    end = leaves_at(reference, classes)
    if end == float("inf"):
        return end
    p = [p for step, p in zip(reference["step"], reference["pass_rate"]) if step <= end]
    return float((WINDOW / vision.relative_speed(advantage, p, rollouts)).sum())


def mean_interval(values: Sequence[float]) -> Interval:
    """`over_seeds` of a share in [0, 1], the interval cut to that range."""
    found = over_seeds(values)
    return Interval(found.value, max(0.0, found.low), min(1.0, found.high))


def select(records: Sequence[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    """The records whose settings are these; UserError when there is none."""
    found = [record for record in records if all(record["config"][name] == value for name, value in settings.items())]
    if not found:
        raise UserError(f"no recorded run with {', '.join(f'{k}={v!r}' for k, v in settings.items())}")
    return found


def record(config: VisionConfig, result: VisionResult, data: tuple[ImageSet, ImageSet | None],
           cpu_seconds: float | None) -> dict[str, Any]:
    """The record of a finished run, ready for `json.dumps`. No name of a machine, a user or a folder gets in.

    cpu_seconds: None where they are not known, as of a run that was resumed.
    """
    device = pick_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    tests = [{"step": m["step"], **{k: round(v, 5) for k, v in m.items() if k.startswith("test_")}}
             for m in result.metrics if "test_top1" in m]
    return {"config": settings_of(config), "classes": len(data[0].classes), "steps": len(result.metrics),
            "curve": curve(result.metrics), "tests": tests,
            "tested_on": "training images" if data[1] is None else "test images",
            "cpu_seconds": None if cpu_seconds is None else round(cpu_seconds, 1), "hardware": name,
            "versions": {"sage_lite": sage_lite.__version__, "torch": torch.__version__}}


def settings_of(config: VisionConfig) -> dict[str, Any]:
    """What makes a run this run, as JSON gives it back; of a folder of images only its own name."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_RECORDED}
    return json.loads(json.dumps({**settings, "data": short(config.data)}))


def short(path: str) -> str:
    """The last two parts of an absolute path: a record names no folder of the machine it was made on."""
    return "/".join(Path(path).parts[-2:]) if Path(path).is_absolute() else path
