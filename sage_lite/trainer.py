"""The training loop: sample, score, compare within the group, update; with metrics, checkpoints, resume and a clean
stop."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from sage_lite import advantages, checkpoint, loading, memory, unsloth_backend
from sage_lite.config import TrainConfig, batch_indices, check, learning_rate, schedule_factor, step_seed
from sage_lite.errors import UserError
from sage_lite.oom import Limit
from sage_lite.policy import Policy, base_of, encode, load_policy, prompt_style
from sage_lite.recipes import Recipe, recipe
from sage_lite.resume import prepare_folder, stop_on_interrupt
from sage_lite.rewards import score_all
from sage_lite.rollout import rows_at_once, sample
from sage_lite.runlog import CompletionsFile, MetricsFile, progress_bar
from sage_lite.tasks import Task, load_task
from sage_lite.update import dead_groups, group_advantages, update


@dataclass
class TrainResult:
    """What a run leaves in memory: the trained policy, its task, one dict of metrics a step, and where the files
    are."""

    policy: Policy
    task: Task
    metrics: list[dict[str, Any]]
    seconds: float
    stopped_early: bool
    out: Path | None


def train(
    config: TrainConfig,
    policy: Policy | None = None,
    task: Task | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> TrainResult:
    """Run `config` and return the trained policy; `policy` and `task`, when given, are used instead of loading.

    Everything that can be wrong with settings, data, model and disk is checked before the first step and raises
    UserError. Ctrl-C finishes the step, saves and returns with stopped_early=True; a second Ctrl-C interrupts at once.
    say: is told, before the model's weights are loaded, what the run will need (`memory.plan`).
    """
    ready = _prepare(config, policy, task)
    method, advantage, task, rows, prompts = ready.method, ready.advantage, ready.task, ready.rows, ready.prompts
    if say is not None:
        say(ready.plan(config))
    if policy is None:
        policy = load_policy(
            config.model, lora=config.lora, four_bit=config.four_bit or None, dtype=config.dtype, device=config.device,
            keep_reference=config.beta > 0, seed=config.seed, backend=config.backend,
        )  # fmt: skip

    if config.gradient_checkpointing and policy.backend == "unsloth":
        raise UserError(  # its models leave out the padding mask in the mode in which layers are checkpointed
            "gradient_checkpointing is for backend='transformers'; with Unsloth, lower micro_batch_tokens instead"
        )
    peak = learning_rate(config, policy)
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], lr=peak, weight_decay=config.weight_decay)
    out = Path(config.out) if config.out is not None else None
    first = prepare_folder(config, out, policy, optimizer)
    limits = _limits(config, out if first else None, policy, ready)
    started, history, stop_at, warned = time.perf_counter(), [], None, False

    with MetricsFile(out, first) as log, CompletionsFile(out, first) as samples, stop_on_interrupt() as interrupted:
        with progress_bar(config.method, first, config.steps, config.progress) as bar:
            for step in range(first + 1, config.steps + 1):
                began = time.perf_counter()
                generator = torch.Generator(policy.device).manual_seed(step_seed(config.seed, step))
                batch = batch_indices(len(prompts), config.batch_size, step - 1, config.seed)
                rollouts = sample(
                    policy, [prompts[i] for i in batch], config.group_size, max_new_tokens=ready.max_new_tokens,
                    temperature=config.temperature, top_p=config.top_p, generator=generator,
                    rollout_batch=limits["rollout_batch"],
                )  # fmt: skip
                sampled = time.perf_counter()
                scored, failed, failure = score_all(
                    task.score, rollouts.texts, [rows[i] for i in batch for _ in range(config.group_size)]
                )
                if failed and not warned:
                    warned = True
                    warnings.warn(f"step {step}: no reward for {failed} of {len(scored)} rollouts, which leave their "
                                  f"groups; the first:\n{failure}", stacklevel=2)  # fmt: skip
                rewards = torch.tensor([math.nan if r is None else r for r in scored]).view(-1, config.group_size)
                values = group_advantages(advantage, rewards)
                rate = peak * schedule_factor(config, step - 1)
                for parameters in optimizer.param_groups:
                    parameters["lr"] = rate
                numbers = update(
                    policy, optimizer, rollouts, rewards, values, method, beta=config.beta,
                    temperature=config.temperature, grad_clip=config.grad_clip, minibatches=config.minibatches,
                    max_length=ready.max_new_tokens, micro_batch_tokens=limits["micro_batch_tokens"],
                    logits_chunk=config.logits_chunk, share_prompts=config.share_prompts,
                    gradient_checkpointing=config.gradient_checkpointing,
                    generator=torch.Generator().manual_seed(step_seed(config.seed, step)),
                )  # fmt: skip
                optimizer.zero_grad(set_to_none=True)  # the next rollouts need the room
                numbers["lr"] = rate
                seconds = time.perf_counter() - began
                line = {"step": step, "method": config.method, **_batch_metrics(rewards, rollouts, failed), **numbers}
                line |= {
                    "tokens_per_s": rollouts.mask.sum().item() / seconds,
                    "rollout_s": sampled - began,
                    "seconds": seconds,
                }
                history.append(log.write(line))
                if config.log_completions_every and step % config.log_completions_every == 0:
                    samples.write(step, task.prompt(rows[batch[0]], ready.style), rollouts.texts, rewards, values)
                bar.show(line)
                last = step == config.steps or interrupted.is_set()
                if out is not None and (last or step % config.checkpoint_every == 0):
                    state = {"data_position": step * config.batch_size, "lr": rate, "loss_scale": policy.loss_scale}
                    state |= {name: limit.value for name, limit in limits.items()}
                    checkpoint.save_checkpoint(
                        out / "checkpoints", step, policy, optimizer, state, config.keep_checkpoints
                    )
                if interrupted.is_set() and step < config.steps:
                    stop_at = step
                    break
    return TrainResult(policy, task, history, time.perf_counter() - started, stop_at is not None, out)


def plan(config: TrainConfig, task: Task | None = None) -> str:
    """What `train(config)` would do and need, in a few lines. Loads data and tokenizer, no weights; errors as there."""
    return _prepare(config, None, task).plan(config)


@dataclass
class _Ready:
    """What is known of a run before the weights are loaded."""

    method: Recipe
    advantage: Callable[[torch.Tensor], torch.Tensor]
    task: Task
    style: str
    rows: list[dict]
    prompts: list[list[int]]
    max_new_tokens: int
    model_config: Any

    def plan(self, config: TrainConfig) -> str:
        longest = max(len(p) for p in self.prompts)
        return memory.plan(config, self.model_config, self.task.name, longest, self.max_new_tokens, len(self.prompts))


def _prepare(config: TrainConfig, policy: Policy | None, task: Task | None) -> _Ready:
    """Check the settings, load the data, encode the prompts; UserError for whatever cannot be right."""
    check(config)
    method = recipe(config.method)
    advantage = advantages.get(method.advantage, **{**method.advantage_params, **config.advantage_params})
    task = task or load_task(config.task, config.data, **config.task_options)
    if not task.train:
        raise UserError(f"task {task.name!r} has no training problem")
    if policy is not None:
        tokenizer, model_config = policy.tokenizer, policy.causal_lm.config
    else:
        trains_adapter = config.lora > 0 or loading.adapter_config(config.model) is not None
        unsloth_backend.use(config.backend, trains_adapter)  # before anything else imports transformers
        base = base_of(config.model)
        folder = config.model if config.model is not None and loading.has_tokenizer(config.model) else base
        tokenizer, model_config = loading.load_tokenizer(folder), loading.load_config(base)
    style = prompt_style(tokenizer) if prompt_style(tokenizer) in task.styles else task.styles[0]
    max_new_tokens = config.max_new_tokens or task.default_max_new_tokens(style)
    rows, prompts = _fitting(config, task.train, encode(tokenizer, [task.prompt(row, style) for row in task.train]))
    _check_context(model_config, prompts, max_new_tokens)
    return _Ready(method, advantage, task, style, rows, prompts, max_new_tokens, model_config)


def _limits(config: TrainConfig, resumed: Path | None, policy: Policy, ready: _Ready) -> dict[str, Limit]:
    """The sizes that shrink when memory runs out; a resumed run goes on with those it had come down to."""
    tokens, rows = max(len(p) for p in ready.prompts) + ready.max_new_tokens, config.batch_size * config.group_size
    rows = min(rows, config.rollout_batch or rows_at_once(ready.model_config, tokens, policy.device) or rows)
    values = {"rollout_batch": rows, "micro_batch_tokens": config.micro_batch_tokens}
    if resumed is not None:
        state = json.loads((checkpoint.latest(resumed / "checkpoints") / "state.json").read_text())
        policy.loss_scale = state.get("loss_scale", 1.0)
        values = {name: min(value, state.get(name, value)) for name, value in values.items()}
    return {name: Limit(name, value) for name, value in values.items()}


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
                      "are left out", stacklevel=3)  # fmt: skip
    return [rows[i] for i in fit], [prompts[i] for i in fit]


def _batch_metrics(rewards: torch.Tensor, rollouts, failed: int) -> dict[str, float]:
    live = rewards[~rewards.isnan()]
    return {
        "reward": live.mean().item(),
        "pass_rate": (live >= 1.0).float().mean().item(),
        "dead_groups": dead_groups(rewards).float().mean().item(),
        "failed_rewards": failed,
        "length": rollouts.mask.sum(-1).float().mean().item(),
        "cut_off": (~rollouts.finished).float().mean().item(),
    }


def _check_context(model_config, prompts: list[list[int]], max_new_tokens: int) -> None:
    longest, context = max(len(p) for p in prompts), int(getattr(model_config, "max_position_embeddings", 0) or 10**9)
    if longest + max_new_tokens > context:
        raise UserError(
            f"the longest of {len(prompts)} training prompts has {longest} tokens; "
            f"with max_new_tokens={max_new_tokens} that passes the model's context of {context}: "
            f"lower max_new_tokens, or leave long prompts out with max_prompt_tokens={context - max_new_tokens}"
        )
