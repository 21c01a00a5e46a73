"""The settings of a training run, and what follows from them alone: learning rate, schedule, order of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sage_lite.errors import UserError
from sage_lite.policy import BACKENDS, Policy
from sage_lite.recipes import recipe

SCHEDULES = ("constant", "linear", "cosine")


@dataclass
class TrainConfig:
    """All of a run. Lengths in tokens, sizes in prompts; None where the task, the model or the recipe decides.

    method: a row of `sage_lite.recipes`; advantage_params override its own, such as {"tau": 0.3}.
    model, lora, four_bit, dtype, device, backend: as in `load_policy`. task, data, task_options: as in `load_task`.
    batch_size: prompts a step; group_size: rollouts a prompt. minibatches: optimizer steps a batch.
    max_prompt_tokens: longer training prompts are left out; None takes all, and refuses those that do not fit.
    lr: None takes 2e-4 * sqrt(1e6 / weights), ten times that with LoRA: a rule of thumb of ours, not the paper's.
    beta: weight of the KL term. out: folder of the run, None leaves no file. resume: go on from its last checkpoint.
    log_completions_every: every so many steps one whole group goes to completions.jsonl, 0 never.

    What fits into memory; the gradient is the same whatever these are: micro_batch_tokens, most tokens in one forward
    and backward pass, padding included; logits_chunk, most tokens whose logits are held at a time; share_prompts, a
    prompt computed once a group; gradient_checkpointing, activations computed again in the backward pass, about a third
    more time, without shared prompts. rollout_batch: most rollouts sampled at a time, which decides which samples a
    seed gives (None: all, or `rollout.rows_at_once` on a CPU). All may change in a resumed run.
    """

    method: str = "sage"
    advantage_params: dict[str, Any] = field(default_factory=dict)
    task: str = "countdown"
    data: str | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    lora: int = 0
    four_bit: bool = False
    dtype: str = "auto"
    device: str | None = None
    backend: str = "transformers"
    steps: int = 300
    batch_size: int = 64
    group_size: int = 8
    max_new_tokens: int | None = None
    max_prompt_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    lr: float | None = None
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    grad_clip: float = 1.0
    beta: float = 0.0
    minibatches: int = 1
    micro_batch_tokens: int = 16_384
    logits_chunk: int = 1024
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    rollout_batch: int | None = None
    seed: int = 0
    out: str | None = None
    resume: bool = False
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    log_completions_every: int = 50
    progress: bool = True


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
    for name in (
        "steps",
        "batch_size",
        "group_size",
        "minibatches",
        "micro_batch_tokens",
        "logits_chunk",
        "checkpoint_every",
        "keep_checkpoints",
    ):
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be >= 1, got {getattr(config, name)}")
    for name in ("rollout_batch", "max_prompt_tokens", "max_new_tokens"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise UserError(f"{name} must be >= 1 or None, got {getattr(config, name)}")
    if config.group_size == 1 and recipe(config.method).advantage not in ("reinforce", "sign"):
        raise UserError(
            f"group_size=1 leaves {config.method} nothing to compare: every advantage would be 0; use 2 or more"
        )
    if config.temperature <= 0:
        raise UserError(f"temperature must be > 0 to train, got {config.temperature}: greedy rollouts are all the same")
    if config.beta < 0 or (config.lr is not None and config.lr <= 0):
        raise UserError(f"beta must be >= 0 and lr > 0, got beta={config.beta}, lr={config.lr}")
    if config.schedule not in SCHEDULES:
        raise UserError(f"unknown schedule {config.schedule!r}; choose {', '.join(SCHEDULES)}")
    if config.backend not in BACKENDS:
        raise UserError(f"unknown backend {config.backend!r}; choose {', '.join(BACKENDS)}")
    if config.resume and config.out is None:
        raise UserError("resume=True needs out=..., the folder of the run to go on with")


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
