"""The command line's options that several commands share, and those of `train`: one for each field of TrainConfig."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from sage_lite.config import TrainConfig
from sage_lite.policy import DTYPES
from sage_lite.tasks import task_names


def positive(text: str) -> int:
    """A whole number >= 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Settings by name, written as a JSON object, for argparse."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"seed": 1}}, got {text!r}')
    return value


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """One option a field of TrainConfig: the dataclass stays the only list of settings, and says what each is.

    Only the options given are in the result, so that a preset stands where there is none.
    """
    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        option, kind = "--" + field.name.replace("_", "-"), hints[field.name]
        is_object = field.default_factory is not dataclasses.MISSING  # the two dictionaries, as JSON
        default = "{}" if is_object else field.default
        about = f"{field.metadata.get('help', '')} (default: {default})".strip().replace("%", "%%")
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": about}
        if is_object:
            parser.add_argument(option, type=json_object, metavar="JSON", **common)
        elif kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, **common)
        else:
            union = get_origin(kind) in (Union, types.UnionType)
            parser.add_argument(option, type=get_args(kind)[0] if union else kind, **common)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The model, and the task, that `evaluate` and `chat` are about."""
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--model", help="folder of a model, an adapter or a run, or hub id; else the embedded model")
    add("--adapter", help="folder of an adapter, or of a run that trained one, to put on --model")
    add("--task", help=f"{', '.join(task_names())}, reasoning_gym:NAME (default: that of the run, else countdown)")
    add("--data", help="JSONL or Parquet file, folder, or hub id; 'hub' for the task's own one (default: that of the "
                       "run, else what the task generates)")  # fmt: skip
    add("--task-options", type=json_object, default={}, metavar="JSON",
        help="as in load_task, over those of the run (default: {})")  # fmt: skip
    add("--max-new-tokens", type=positive, help="most tokens of a completion (default: the task's own number)")
    add("--temperature", type=float, default=1.0, help=f"of the sampling {default}")
    add("--top-p", type=float, default=1.0, help=f"sample from the likeliest tokens that have this share {default}")
    add("--seed", type=int, default=0, help=f"of the sampling {default}")
    add("--four-bit", action=argparse.BooleanOptionalAction, default=None,
        help="load the weights in 4 bits (default: as the adapter was trained)")  # fmt: skip
    add("--dtype", default="auto", help=f"format of the weights: auto, {', '.join(DTYPES)} {default}")
    add("--device", help="such as cpu or cuda:0 (default: the first GPU, else the CPU)")
