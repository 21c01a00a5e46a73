"""What can be known of a run before any weights are loaded: settings checked, data read, prompts encoded, sizes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from dataclasses import dataclass
from typing import Any, Callable

import torch

from sage_lite import advantages, loading, memory, unsloth_backend
from sage_lite.config import TrainConfig, check
from sage_lite.errors import UserError
from sage_lite.policy import DTYPES, Policy, base_of, encode, prompt_style, run_weights
from sage_lite.recipes import Recipe, recipe
from sage_lite.tasks import Task, load_task


@dataclass
class Ready:
    """A run that could start. model: where its weights are, the last checkpoint if the config names a run's folder."""

    method: Recipe
    advantage: Callable[[torch.Tensor], torch.Tensor]
    task: Task
    style: str
    rows: list[dict]
    prompts: list[list[int]]
    max_new_tokens: int
    model: Any
    model_config: Any

    def plan(self, config: TrainConfig) -> str:
        """What the run would do and need, in a few lines."""
        longest, config = max(len(p) for p in self.prompts), dataclasses.replace(config, model=self.model)
        return memory.plan(
            config, self.model_config, self.task.name, longest, self.max_new_tokens, len(self.prompts), self.task.source
        )

    def data(self) -> dict[str, str]:
        """The training rows' number and digest, by which a resumed run knows them again."""
        # Of an object that JSON does not know only the type counts: its text may hold an address.
        text = json.dumps(self.rows, default=lambda value: type(value).__name__)
        return {"training_data": f"{len(self.rows)} rows, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"}


def prepare(config: TrainConfig, policy: Policy | None, task: Task | None) -> Ready:
    """Check the settings, load the data, encode the prompts; UserError for whatever cannot be right."""
    check(config)
    method = recipe(config.method)
    advantage = advantages.get(method.advantage, **{**method.advantage_params, **config.advantage_params})
    task = task or _load_task(config)
    if not task.train:
        raise UserError(f"task {task.name!r} has no training problem")
    model = run_weights(config.model)
    if policy is not None:
        tokenizer, model_config = policy.tokenizer, policy.causal_lm.config
        formats = set() if policy.is_adapter else {p.dtype for _, p in policy.trainable()}
        if config.beta > 0:
            with policy.reference():  # raises where there is none
                pass
    else:
        trains_adapter = config.lora > 0 or loading.adapter_config(model) is not None
        formats = set() if trains_adapter or config.dtype == "auto" else {DTYPES[config.dtype]}
        unsloth_backend.use(config.backend, trains_adapter)  # before anything else imports transformers
        base = base_of(model)
        folder = model if model is not None and loading.has_tokenizer(model) else base
        tokenizer, model_config = loading.load_tokenizer(folder), loading.load_config(base)
    _check_formats(formats)
    style = prompt_style(tokenizer) if prompt_style(tokenizer) in task.styles else task.styles[0]
    max_new_tokens = config.max_new_tokens or task.default_max_new_tokens(style)
    rows, prompts = _fitting(config, task.train, encode(tokenizer, [task.prompt(row, style) for row in task.train]))
    _check_context(model_config, prompts, max_new_tokens)
    return Ready(method, advantage, task, style, rows, prompts, max_new_tokens, model, model_config)


def _load_task(config: TrainConfig) -> Task:
    try:
        return load_task(config.task, config.data, **config.task_options)
    except TypeError as error:
        raise UserError(f"task_options={config.task_options!r} do not fit the task {config.task}: {error}") from error


def _check_formats(formats: set[torch.dtype]) -> None:
    """UserError or a warning where all weights are to be trained in a format too coarse for that."""
    if torch.float16 in formats:
        raise UserError(
            "all weights are trained, and float16 is too narrow for that (Adam's eps of 1e-8 is 0 there, and the first "
            "step makes the weights NaN): use dtype='auto', or an adapter, as with lora=16"
        )
    if torch.bfloat16 in formats:
        warnings.warn(
            "all weights are trained in bfloat16, where steps as small as lr=1e-6 vanish in the rounding of nearly all "
            "of them: use dtype='auto', which is float32 here, or an adapter, as with lora=16", stacklevel=4,
        )  # fmt: skip


def _fitting(config: TrainConfig, rows: list[dict], prompts: list[list[int]]) -> tuple[list[dict], list[list[int]]]:
    """The training rows whose prompts have at most max_prompt_tokens, and these prompts; says how many are left out."""
    most = config.max_prompt_tokens
    if most is None:
        return rows, prompts
    fit = [i for i, p in enumerate(prompts) if len(p) <= most]
    if not fit:
        raise UserError(
            f"no training prompt has at most max_prompt_tokens={most} tokens: the shortest of {len(prompts)} has "
            f"{min(len(p) for p in prompts)}"
        )
    if len(fit) < len(prompts):
        warnings.warn(f"{len(prompts) - len(fit)} of {len(prompts)} training prompts have more than {most} tokens and "
                      "are left out", stacklevel=4)  # fmt: skip
    return [rows[i] for i in fit], [prompts[i] for i in fit]


def _check_context(model_config, prompts: list[list[int]], max_new_tokens: int) -> None:
    longest, context = max(len(p) for p in prompts), int(getattr(model_config, "max_position_embeddings", 0) or 10**9)
    if longest + max_new_tokens > context:
        room = context - max_new_tokens
        raise UserError(
            f"the longest of {len(prompts)} training prompts has {longest} tokens; "
            f"with max_new_tokens={max_new_tokens} that passes the model's context of {context}: lower max_new_tokens"
            + (f", or leave long prompts out with max_prompt_tokens={room}" if room > 0 else "")
        )
