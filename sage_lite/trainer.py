"""The training loop: sample, score, compare within the group, update; with metrics, checkpoints, resume and a clean
stop."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from sage_lite import checkpoint
from sage_lite.config import TrainConfig, batch_indices, learning_rate, schedule_factor, step_seed
from sage_lite.device import fixed_order
from sage_lite.errors import UserError
from sage_lite.folders import run_folder
from sage_lite.oom import Limit
from sage_lite.policy import Policy, load_policy
from sage_lite.prepare import Ready, prepare
from sage_lite.resume import Saver, prepare_folder, stop_on_interrupt
from sage_lite.rewards import score_all
from sage_lite.rollout import rows_at_once, sample
from sage_lite.runlog import CompletionsFile, MetricsFile, progress_bar
from sage_lite.tasks import Task
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
    UserError. Ctrl-C or SIGTERM finishes the step, saves and returns with stopped_early=True; a second one ends the
    process at once. If sampling or scoring fails, what is done is saved. Diverged: the weights are no longer finite.
    say: is told, before the model's weights are loaded, what the run will need (`memory.plan`).
    """
    ready = prepare(config, policy, task)
    if say is not None:
        say(ready.plan(config))
    with run_folder(config.out, config.resume) as out:  # before the weights are loaded, which may take long
        return _run(config, ready, policy, out)


def plan(config: TrainConfig, task: Task | None = None) -> str:
    """What `train(config)` would do and need, in a few lines. Loads data and tokenizer, no weights; errors as there."""
    return prepare(config, None, task).plan(config)


def _run(config: TrainConfig, ready: Ready, policy: Policy | None, out: Path | None) -> TrainResult:
    method, advantage, task, rows, prompts = ready.method, ready.advantage, ready.task, ready.rows, ready.prompts
    if policy is None:
        policy = load_policy(
            ready.model, lora=config.lora, four_bit=config.four_bit or None, dtype=config.dtype, device=config.device,
            keep_reference=config.beta > 0, seed=config.seed, backend=config.backend,
        )  # fmt: skip

    if config.gradient_checkpointing and policy.backend == "unsloth":
        raise UserError(  # its models leave out the padding mask in the mode in which layers are checkpointed
            "gradient_checkpointing is for backend='transformers'; with Unsloth, lower micro_batch_tokens instead"
        )
    peak = learning_rate(config, policy)
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], lr=peak, weight_decay=config.weight_decay)
    first = prepare_folder(config, out, policy, optimizer, ready.data())
    limits = _limits(config, out if first else None, policy, ready)
    saver = Saver(config, out, policy, optimizer)
    if first > config.steps:
        raise UserError(f"{out} is at step {first} already: give more than steps={config.steps} to go on with it")
    if first == config.steps:
        warnings.warn(f"{out} is at step {first} already, and nothing is left to do: give more steps", stacklevel=3)
    started, history, stopped, warned = time.perf_counter(), [], False, False

    with MetricsFile(out, first) as log, CompletionsFile(out, first) as samples, stop_on_interrupt() as interrupted:
        with fixed_order(policy.device), progress_bar(config.method, first, config.steps, config.progress) as bar:
            for step in range(first + 1, config.steps + 1):
                began = time.perf_counter()
                generator = torch.Generator(policy.device).manual_seed(step_seed(config.seed, step))
                batch = batch_indices(len(prompts), config.batch_size, step - 1, config.seed)
                with saver.rescue(step):
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
                                  f"groups; the first:\n{failure}", stacklevel=3)  # fmt: skip
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
                last = step == config.steps or interrupted.is_set()  # asked once: the save and the stop go together
                state = {"data_position": step * config.batch_size, "lr": rate, "loss_scale": policy.loss_scale}
                saver.done(step, state | {name: limit.value for name, limit in limits.items()}, last)
                if last and step < config.steps:
                    stopped = True
                    break
    return TrainResult(policy, task, history, time.perf_counter() - started, stopped, out)


def _limits(config: TrainConfig, resumed: Path | None, policy: Policy, ready: Ready) -> dict[str, Limit]:
    """The sizes that shrink when memory runs out; a resumed run goes on with those it had come down to."""
    tokens, rows = max(len(p) for p in ready.prompts) + ready.max_new_tokens, config.batch_size * config.group_size
    rows = min(rows, config.rollout_batch or rows_at_once(ready.model_config, tokens, policy.device) or rows)
    values = {"rollout_batch": rows, "micro_batch_tokens": config.micro_batch_tokens}
    if resumed is not None:
        state = checkpoint.last_state(resumed / "checkpoints")
        policy.loss_scale = state.get("loss_scale", 1.0)
        values = {name: min(value, state.get(name, value)) for name, value in values.items()}
    return {name: Limit(name, value) for name, value in values.items()}


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
