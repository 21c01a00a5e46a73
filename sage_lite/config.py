"""The settings of a training run, and what follows from them alone: learning rate, schedule, order of the data."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from os import PathLike
from typing import Any

import torch

from sage_lite.checks import number, whole
from sage_lite.errors import UserError
from sage_lite.policy import BACKENDS, DTYPES, Policy
from sage_lite.recipes import RECIPES, recipe

SCHEDULES = ("constant", "linear", "cosine")


def _setting(default: Any, help: str, **rules: Any) -> Any:
    """A field whose metadata hold its help text and the rules it is checked by: at_least, above, most, choices."""
    if default is dict:
        return field(default_factory=dict, metadata={"help": help, **rules})
    return field(default=default, metadata={"help": help, **rules})


@dataclass
class TrainConfig:
    """All of a run: each field's `metadata["help"]` says what it is. None where the task, model or recipe decides.

    lr: None takes 2e-4 * sqrt(1e6 / weights), ten times that with LoRA: a rule of thumb of ours, not the paper's.
    The gradient is the same whatever the settings of memory are, and all of them may change in a resumed run; but
    rollout_batch decides which samples a seed gives (None: all, or `rollout.rows_at_once` on a CPU).
    """

    method: str = _setting("sage", f"how groups are compared and the loss: {', '.join(RECIPES)}")
    advantage_params: dict[str, Any] = _setting(dict, 'parameters of the method over its own, as {"tau": 0.3}')
    task: str = _setting("countdown", "problems and reward: countdown, gsm8k, deepmath, math500, reasoning_gym:NAME")
    data: str | None = _setting(None, "JSONL or Parquet file, folder or hub id of the problems; else the task's own")
    task_options: dict[str, Any] = _setting(dict, 'options of the task, as {"pool_size": 1024, "test_size": 100}')
    model: str | None = _setting(None, "folder of a model, adapter or run, or a hub id; else the embedded tiny model")
    lora: int = _setting(0, "rank of a new LoRA adapter; 0 trains all weights, or the adapter given", at_least=0)
    four_bit: bool = _setting(False, "keep the frozen weights in 4 bits (bitsandbytes); needs an adapter")
    dtype: str = _setting("auto", "format of the weights: auto (float32 where all are trained), float32, bfloat16, "
                          "float16", choices=("auto", *DTYPES))  # fmt: skip
    device: str | None = _setting(None, "cpu, cuda or cuda:1; else the GPU if there is one")
    backend: str = _setting("transformers", f"what loads and runs the model: {', '.join(BACKENDS)}", choices=BACKENDS)
    steps: int = _setting(300, "training steps in all, those before a resume included", at_least=1)
    batch_size: int = _setting(64, "prompts a step", at_least=1)
    group_size: int = _setting(8, "rollouts a prompt, M", at_least=1)
    max_new_tokens: int | None = _setting(None, "most tokens of a completion; else the task's own", at_least=1)
    max_prompt_tokens: int | None = _setting(
        None, "leave out training prompts of more tokens; else take all, and refuse those that do not fit", at_least=1
    )
    temperature: float = _setting(1.0, "temperature of sampling, above 0", above=0.0)
    top_p: float = _setting(1.0, "sample from the likeliest tokens of this total probability", above=0.0, most=1.0)
    lr: float | None = _setting(None, "peak learning rate of AdamW; else by the number of weights", above=0.0)
    weight_decay: float = _setting(0.0, "weight decay of AdamW", at_least=0.0)
    warmup_steps: int = _setting(0, "steps in which the learning rate rises to its peak", at_least=0)
    schedule: str = _setting("constant", f"learning rate over the steps: {', '.join(SCHEDULES)}", choices=SCHEDULES)
    grad_clip: float = _setting(1.0, "longest gradient, as its norm; 0 clips nothing", at_least=0.0)
    beta: float = _setting(0.0, "weight of the KL term against the start", at_least=0.0)
    minibatches: int = _setting(1, "optimizer steps a batch, at most batch_size", at_least=1)
    micro_batch_tokens: int = _setting(
        16_384, "memory: most tokens in one forward and backward pass, padding included", at_least=1
    )
    logits_chunk: int = _setting(1024, "memory: most tokens whose logits are held at a time", at_least=1)
    share_prompts: bool = _setting(True, "compute each prompt once a group")
    gradient_checkpointing: bool = _setting(
        False, "memory: compute activations again in the backward pass, about a third more time; no shared prompts"
    )
    rollout_batch: int | None = _setting(None, "memory: most rollouts sampled at a time", at_least=1)
    seed: int = _setting(0, "seed of samples, data order and a new adapter's start", at_least=0)
    out: str | None = _setting(None, "folder of the run; else no file is left")
    resume: bool = _setting(False, "go on from the last checkpoint in out")
    checkpoint_every: int = _setting(50, "steps between checkpoints", at_least=1)
    keep_checkpoints: int = _setting(2, "how many checkpoints to keep, the newest", at_least=1)
    log_completions_every: int = _setting(50, "steps between groups shown in completions.jsonl; 0 never", at_least=0)
    progress: bool = _setting(True, "show a progress bar")


# Fields that a resumed run may change without becoming another run.
FREE = {
    "steps",
    "resume",
    "out",
    "progress",
    "checkpoint_every",
    "keep_checkpoints",
    "log_completions_every",
    "device",
    "micro_batch_tokens",
    "logits_chunk",
    "share_prompts",
    "gradient_checkpointing",
    "rollout_batch",
}


def check(config: TrainConfig) -> None:
    """UserError for settings that make no sense, before anything is loaded."""
    if config.temperature == 0:
        raise UserError("temperature must be above 0 to train, got 0: greedy rollouts are all the same")
    for setting in fields(config):
        value = getattr(config, setting.name)
        if value is not None or setting.default is not None:
            _check_setting(setting, value)
    if config.seed >= 2**63:
        raise UserError(f"seed must be below 2**63, got {config.seed}")
    if config.minibatches > config.batch_size:
        raise UserError(
            f"minibatches={config.minibatches} are more than the batch_size={config.batch_size} prompts of a step: "
            "each needs one, so lower minibatches"
        )
    if config.group_size == 1 and recipe(config.method).advantage not in ("reinforce", "sign"):
        raise UserError(
            f"group_size=1 leaves {config.method} nothing to compare: every advantage would be 0; use 2 or more"
        )
    if config.resume and config.out is None:
        raise UserError("resume=True needs out=..., the folder of the run to go on with")


def _check_setting(setting: Field, value: Any) -> None:
    """UserError unless `value` is of the setting's type and within its rules."""
    name, rules, kind = setting.name, setting.metadata, setting.type.removesuffix(" | None")
    if kind == "int":
        whole(name, value, rules["at_least"])
    elif kind == "float":
        number(name, value, above=rules.get("above"), at_least=rules.get("at_least"))
        if value > rules.get("most", value):
            raise UserError(f"{name} must be at most {rules['most']:g}, got {value!r}")
    elif kind == "bool" and not isinstance(value, bool):
        raise UserError(f"{name} must be True or False, got {value!r}")
    elif kind.startswith("dict") and not isinstance(value, dict):
        raise UserError(f"{name} must be a dictionary of names and values, {{}} for none, got {value!r}")
    elif kind == "str" and name not in ("data", "device") and not isinstance(value, (str, PathLike)):
        raise UserError(f"{name} must be a text, got {value!r}")
    if value not in rules.get("choices", (value,)):
        raise UserError(f"unknown {name} {value!r}; choose {', '.join(rules['choices'])}")


def learning_rate(config: TrainConfig, policy: Policy) -> float:
    """The peak learning rate of a run: the configured one, or the rule of thumb in TrainConfig."""
    if config.lr is not None:
        return config.lr
    # num_parameters counts a 4-bit weight as one, though two of them lie in each stored byte
    return 2e-4 * math.sqrt(1e6 / policy.causal_lm.num_parameters()) * (10.0 if policy.is_adapter else 1.0)


def schedule_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate at `step` (from 0): like the data position a function of the step, not a
    state."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    done = min(1.0, step / config.steps)
    return (
        warm
        * {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    )


def batch_indices(rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The rows of batch `step` (from 0): every epoch is a new seeded permutation, and batches run on over its end.

    A function of its arguments alone, so the data position is the step number and nothing can get lost in a resume.
    """
    picked, orders = [], {}
    for i in range(step * batch_size, (step + 1) * batch_size):
        epoch = i // rows
        if epoch not in orders:
            orders[epoch] = torch.randperm(rows, generator=torch.Generator().manual_seed(step_seed(seed, -epoch - 1)))
        picked.append(int(orders[epoch][i % rows]))
    return picked


def step_seed(seed: int, step: int) -> int:
    """The seed of everything random in one step of a run."""
    return (seed * 1_000_003 + step) % 2**63
