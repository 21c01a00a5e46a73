"""Named settings for `train`: those of the paper, and one for the GPU that a free notebook has."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from sage_lite.config import TrainConfig
from sage_lite.errors import UserError
from sage_lite.tasks import hub_of


@dataclass(frozen=True)
class Preset:
    """What a preset changes in TrainConfig, and where these settings come from."""

    changes: dict[str, Any]
    source: str


# arXiv 2608.09271: base model, sampling, clipping (which is our recipes' common base too), KL, batch, learning rate.
# It trains all weights. The number of steps is ours, and so is how much is computed at a time, for a GPU of 80 GB.
_PAPER = {
    "method": "sage",
    "model": "Qwen/Qwen2.5-1.5B",
    "data": "hub",
    "group_size": 8,
    "batch_size": 64,
    "temperature": 1.0,
    "top_p": 0.999,
    "lr": 1e-6,
    "beta": 1e-3,
    "steps": 200,
    "micro_batch_tokens": 8192,
    "rollout_batch": 256,
}

PRESETS: dict[str, Preset] = {
    "paper-gsm8k": Preset(
        {**_PAPER, "task": "gsm8k", "advantage_params": {"tau": 0.1}, "max_new_tokens": 256},
        "arXiv 2608.09271, GSM8K with the exact reward; steps ours",
    ),
    "paper-gsm8k-similarity": Preset(
        {
            **_PAPER,
            "task": "gsm8k",
            "task_options": {"reward": "similarity"},
            "advantage_params": {"tau": 0.3},
            "max_new_tokens": 256,
        },
        "arXiv 2608.09271, GSM8K with the similarity reward; steps ours",
    ),
    "paper-countdown": Preset(
        {**_PAPER, "task": "countdown", "advantage_params": {"tau": 0.1}, "max_new_tokens": 256},
        "arXiv 2608.09271, Countdown; steps ours",
    ),
    "paper-deepmath": Preset(
        {
            **_PAPER,
            "task": "deepmath",
            "advantage_params": {"tau": 0.3},
            "group_size": 16,
            "max_new_tokens": 1024,
            "max_prompt_tokens": 512,
        },
        "arXiv 2608.09271, DeepMath-103K; steps and the limit on prompts ours",
    ),
    # A T4 has 15 GB and no bfloat16: 4-bit weights, an adapter in float32, float16 arithmetic. The chat model, because
    # it answers in the asked form from the start; batch and lengths so that a step takes minutes, not an hour.
    "colab-t4": Preset(
        {
            "method": "sage",
            "model": "Qwen/Qwen2.5-1.5B-Instruct",
            "task": "gsm8k",
            "data": "hub",
            "advantage_params": {"tau": 0.1},
            "lora": 16,
            "four_bit": True,
            "dtype": "float16",
            "group_size": 8,
            "batch_size": 8,
            "max_new_tokens": 256,
            "max_prompt_tokens": 256,
            "top_p": 0.999,
            "beta": 1e-3,
            "steps": 100,
            "micro_batch_tokens": 2048,
            "logits_chunk": 256,
            "rollout_batch": 64,
            "checkpoint_every": 10,
            "log_completions_every": 10,
        },
        "ours; method and loss as in arXiv 2608.09271",
    ),
}


def configure(name: str | None, given: dict[str, Any] | None = None) -> TrainConfig:
    """A TrainConfig with the preset's settings and, over them, those in `given`; None is no preset.

    lr = 1e-6 of the paper is for all weights: a run that trains an adapter takes the rule of TrainConfig instead, if
    `given` has no rate. Another method takes its own advantage_params, another task its own task_options, and data of
    its own where it has none on the hub. A model of one's own, or data, does not change the rest. Raises UserError for
    an unknown name.
    """
    given = dict(given or {})
    if name is None:
        return TrainConfig(**given)
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    changes = copy.deepcopy(PRESETS[name].changes)
    if given.get("lora") and "lr" not in given:
        changes.pop("lr", None)
    if given.get("method", changes["method"]) != changes["method"]:
        changes.pop("advantage_params", None)
    if given.get("task", changes["task"]) != changes["task"]:
        changes.pop("task_options", None)
        if hub_of(given["task"]) is None:
            changes.pop("data", None)
    return TrainConfig(**{**changes, **given})


def table() -> str:
    """Each preset in two lines: where it comes from, and what it sets."""
    lines = []
    for name, preset in PRESETS.items():
        settings = ", ".join(f"{key}={value}" for key, value in preset.changes.items())
        lines += [f"{name}: {preset.source}", f"  {settings}"]
    return "\n".join(lines)
