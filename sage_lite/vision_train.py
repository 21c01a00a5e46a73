"""The command that trains classifiers on sampled labels, one run for each method, number of rollouts and seed.

    python -m sage_lite.vision_train --method sage --tau 0.2 --rollouts 1024
    python -m sage_lite.vision_train --method reinforce sage --seed 0 1 2 --record runs.jsonl
    python -m sage_lite.vision_train --preset imagenet --data FOLDER --out runs/imagenet-sage
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sage_lite.errors import Diverged, UserError
from sage_lite.runlog import read_lines
from sage_lite.vision_loop import PRESETS, VisionConfig, check, load_data, train
from sage_lite.vision_runs import leaves_at, record, settings_of, short

_SWEPT = ("method", "rollouts", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m sage_lite.vision_train`: one run for each method, number of rollouts and seed.

    Returns 2 for bad settings, 1 if a run diverged, 130 after Ctrl-C, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sage_lite.vision_train", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a classifier on sampled labels: one run for each method, number of rollouts and seed.",
        epilog=inspect.getdoc(VisionConfig),
    )  # fmt: skip
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
    words = [_shown(word) for word in (sys.argv[1:] if argv is None else argv)]
    command = "python -m sage_lite.vision_train " + shlex.join(words)
    try:
        if preset == "imagenet64" and "data" not in given:
            raise UserError("the preset imagenet64 needs --data, a folder with one folder of images a class")
        return _run_all({**PRESETS[preset], **given}, path, tau, command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run_all(given: dict[str, Any], path: Path | None, tau: float | None, command: str) -> int:
    configs = _configs(given, tau)
    for config in configs:
        check(config)
    done = [] if path is None else _recorded(path)
    data, code = load_data(configs[0]), 0
    for config in configs:
        name = f"{config.method}, {config.rollouts} rollouts, seed {config.seed}"
        if settings_of(config) in done:
            print(f"{name}: already recorded")
            continue
        began = time.process_time()
        try:
            result = train(config, data)
        except Diverged as error:  # the other runs go on
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            code = 1
            continue
        if result.stopped_early:
            hint = "not recorded" if config.out is None else "go on with --resume"
            print(f"{name}: stopped after step {len(result.metrics)}; {hint}", flush=True)
            return 130
        line = record(config, result, data, None if config.resume else time.process_time() - began)
        end = {k.removeprefix("test_"): round(v, 4) for k, v in line["tests"][-1].items() if k.startswith("test_")}
        print(f"{name}: leaves at {leaves_at(line['curve'], line['classes'])}, {end}", flush=True)
        done.append(settings_of(config))
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps({"command": command, **line}) + "\n")
    return code


def _configs(given: dict[str, Any], tau: float | None) -> list[VisionConfig]:
    swept = {name: given.pop(name, [getattr(VisionConfig, name)]) for name in _SWEPT}
    if tau is not None and "sage" not in swept["method"]:
        raise UserError(f"tau is SAGE's temperature, and the methods are {', '.join(swept['method'])}: leave it out")
    configs = [VisionConfig(**given, method=method, rollouts=rollouts, seed=seed,
                            advantage_params={"tau": tau} if method == "sage" and tau is not None else {})
               for seed in swept["seed"] for rollouts in swept["rollouts"] for method in swept["method"]
               if method != "cross_entropy" or rollouts == swept["rollouts"][0]]
    if len(configs) > 1 and given.get("out"):
        raise UserError(f"out is the folder of one run, and this is {len(configs)}: use record instead")
    return configs


def _recorded(path: Path) -> list[dict[str, Any]]:
    """The settings of the runs in a record file, made ready to be appended to: a half line, left by a kill, is cut."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            file.seek(0)
            text = file.read()
            if text and not text.endswith("\n"):
                file.truncate(len(text[:text.rfind("\n") + 1].encode()))
        return [line["config"] for line in read_lines(path)]
    except OSError as error:
        raise UserError(f"cannot write the record file {path} ({error.strerror}): choose another one") from error
    except (KeyError, TypeError):
        raise UserError(f"{path} holds other lines than this command's records: choose another file") from None


def _shown(word: str) -> str:
    """A word of the command as a record shows it: of a folder only its own name, also behind an option's "="."""
    option, equals, value = word.partition("=")
    return f"{option}={short(value)}" if equals and option.startswith("-") else short(word)


if __name__ == "__main__":
    raise SystemExit(main())
