"""The command that trains classifiers on sampled labels, one run for each method, number of rollouts and seed.

    python -m sage_lite.vision_train --method sage --tau 0.2 --rollouts 1024
    python -m sage_lite.vision_train --method reinforce sage --seed 0 1 2 --record runs.jsonl
    python -m sage_lite.vision_train --preset imagenet --data FOLDER --out runs/imagenet-sage
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_lite.errors import UserError
from sage_lite.runlog import read_lines
from sage_lite.vision_loop import PRESETS, VisionConfig, load_data, train
from sage_lite.vision_runs import leaves_at, record, settings_of, short

_SWEPT = ("method", "rollouts", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m sage_lite.vision_train`: one run for each method, number of rollouts and seed."""
    parser = argparse.ArgumentParser(prog="python -m sage_lite.vision_train", description="Train a classifier on "
                                     "sampled labels: one run for each method, number of rollouts and seed.")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="digits", help="values for what is not given")
    parser.add_argument("--record", type=Path, help="append each run to this JSONL file; those in it are skipped")
    parser.add_argument("--tau", type=float, help="SAGE's temperature (default 0.2)")
    for field in dataclasses.fields(VisionConfig):
        if field.name == "advantage_params":
            continue
        kind = next(kind for kind in (bool, float, int, str) if kind.__name__ in str(field.type))
        options = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        if field.name in _SWEPT:
            options["nargs"] = "+"
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, **options)
    given = vars(parser.parse_args(argv))
    preset, path, tau = (given.pop(name) for name in ("preset", "record", "tau"))
    words = [short(word) for word in (sys.argv[1:] if argv is None else argv)]
    command = "python -m sage_lite.vision_train " + shlex.join(words)
    try:
        _run_all({**PRESETS[preset], **given}, path, tau, command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run_all(given: dict[str, Any], path: Path | None, tau: float | None, command: str) -> None:
    swept = {name: given.pop(name, [getattr(VisionConfig, name)]) for name in _SWEPT}
    configs = [VisionConfig(**given, method=method, rollouts=rollouts, seed=seed,
                            advantage_params={"tau": tau} if method == "sage" and tau else {})
               for seed in swept["seed"] for rollouts in swept["rollouts"] for method in swept["method"]
               if method != "cross_entropy" or rollouts == swept["rollouts"][0]]
    if len(configs) > 1 and given.get("out"):
        raise UserError(f"out is the folder of one run, and this is {len(configs)}: use record instead")
    done = [] if path is None else [line["config"] for line in read_lines(path)]
    data = load_data(configs[0])
    for config in configs:
        name = f"{config.method}, {config.rollouts} rollouts, seed {config.seed}"
        if settings_of(config) in done:
            print(f"{name}: already recorded")
            continue
        began = time.process_time()
        try:
            result = train(config, data)
        except UserError as error:  # a diverged run is a result, too; the others go on
            print(f"{name}: {error}", flush=True)
            if len(configs) == 1:
                raise
            continue
        if result.stopped_early:
            return
        line = record(config, result, data, time.process_time() - began)
        end = {k.removeprefix("test_"): round(v, 4) for k, v in line["tests"][-1].items() if k.startswith("test_")}
        print(f"{name}: leaves at {leaves_at(line['curve'], line['classes'])}, {end}", flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({"command": command, **line}) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
