"""The training loop: sample, score, compare within the group, update; with metrics, checkpoints, resume and a clean
stop."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import torch

from sage_lite import advantages, checkpoint
from sage_lite.errors import UserError
from sage_lite.policy import Policy, load_policy
from sage_lite.recipes import recipe
from sage_lite.rewards import score_all
from sage_lite.rollout import sample
from sage_lite.runlog import CompletionsFile, MetricsFile, progress_bar
from sage_lite.tasks import Task, load_task
from sage_lite.update import dead_groups, group_advantages, update


@dataclass
class TrainConfig:
    """All of a run. Lengths in tokens, sizes in prompts; None where the task, the model or the recipe decides.

    method: a row of `sage_lite.recipes`; advantage_params override its own, such as {"tau": 0.3}.
    model, lora, four_bit, dtype, device: as in `load_policy`. task, data, task_options: as in `load_task`.
    batch_size: prompts a step; group_size: rollouts a prompt. minibatches: optimizer steps a batch.
    lr: None takes 2e-4 * sqrt(1e6 / weights), ten times that with LoRA: a rule of thumb of ours, not the paper's.
    beta: weight of the KL term. out: folder of the run, None leaves no file. resume: go on from its last checkpoint.
    log_completions_every: every so many steps one whole group goes to completions.jsonl, 0 never.
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
    steps: int = 300
    batch_size: int = 64
    group_size: int = 8
    max_new_tokens: int | None = None
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
    share_prompts: bool = True
    seed: int = 0
    out: str | None = None
    resume: bool = False
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    log_completions_every: int = 50
    progress: bool = True


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


# Fields that a resumed run may change without becoming another run.
_FREE = {
    "steps",
    "resume",
    "out",
    "progress",
    "checkpoint_every",
    "keep_checkpoints",
    "log_completions_every",
    "device",
}


def train(config: TrainConfig, policy: Policy | None = None, task: Task | None = None) -> TrainResult:
    """Run `config` and return the trained policy; `policy` and `task`, when given, are used instead of loading.

    Everything that can be wrong with settings, data, model and disk is checked before the first step and raises
    UserError. Ctrl-C finishes the step, saves and returns with stopped_early=True; a second Ctrl-C interrupts at once.
    """
    _check(config)
    method = recipe(config.method)
    advantage = advantages.get(method.advantage, **{**method.advantage_params, **config.advantage_params})
    task = task or load_task(config.task, config.data, **config.task_options)
    if not task.train:
        raise UserError(f"task {task.name!r} has no training problem")
    if policy is None:
        policy = load_policy(
            config.model, lora=config.lora, four_bit=config.four_bit, dtype=config.dtype, device=config.device,
            keep_reference=config.beta > 0, seed=config.seed,
        )  # fmt: skip
    style = policy.prompt_style if policy.prompt_style in task.styles else task.styles[0]
    max_new_tokens = config.max_new_tokens or task.default_max_new_tokens(style)
    prompts = policy.encode([task.prompt(row, style) for row in task.train])
    _check_context(policy, prompts, max_new_tokens)

    peak = learning_rate(config, policy)
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], lr=peak, weight_decay=config.weight_decay)
    out = Path(config.out) if config.out is not None else None
    first = _prepare_folder(config, out, policy, optimizer)
    started, history, stop_at = time.perf_counter(), [], None

    with MetricsFile(out, first) as log, CompletionsFile(out, first) as samples, _stop_on_interrupt() as interrupted:
        with progress_bar(config.method, first, config.steps, config.progress) as bar:
            for step in range(first + 1, config.steps + 1):
                began = time.perf_counter()
                generator = torch.Generator(policy.device).manual_seed(_step_seed(config.seed, step))
                rows = batch_indices(len(prompts), config.batch_size, step - 1, config.seed)
                rollouts = sample(
                    policy, [prompts[i] for i in rows], config.group_size, max_new_tokens=max_new_tokens,
                    temperature=config.temperature, top_p=config.top_p, generator=generator,
                )  # fmt: skip
                sampled = time.perf_counter()
                scored, failed, _ = score_all(
                    task.score, rollouts.texts, [task.train[i] for i in rows for _ in range(config.group_size)]
                )
                rewards = torch.tensor([math.nan if r is None else r for r in scored]).view(-1, config.group_size)
                values = group_advantages(advantage, rewards)
                rate = peak * schedule_factor(config, step - 1)
                for parameters in optimizer.param_groups:
                    parameters["lr"] = rate
                numbers = update(
                    policy, optimizer, rollouts, rewards, values, method, beta=config.beta,
                    temperature=config.temperature,
                    grad_clip=config.grad_clip, minibatches=config.minibatches, max_length=max_new_tokens,
                    micro_batch_tokens=config.micro_batch_tokens, share_prompts=config.share_prompts,
                    generator=torch.Generator().manual_seed(_step_seed(config.seed, step)),
                )  # fmt: skip
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
                    samples.write(step, task.prompt(task.train[rows[0]], style), rollouts.texts, rewards, values)
                bar.show(line)
                last = step == config.steps or interrupted.is_set()
                if out is not None and (last or step % config.checkpoint_every == 0):
                    state = {"data_position": step * config.batch_size, "lr": rate}
                    checkpoint.save_checkpoint(
                        out / "checkpoints", step, policy, optimizer, state, config.keep_checkpoints
                    )
                if interrupted.is_set() and step < config.steps:
                    stop_at = step
                    break
    return TrainResult(policy, task, history, time.perf_counter() - started, stop_at is not None, out)


def learning_rate(config: TrainConfig, policy: Policy) -> float:
    """The peak learning rate of a run: the configured one, or the rule of thumb in TrainConfig."""
    if config.lr is not None:
        return config.lr
    weights = sum(p.numel() for p in policy.model.parameters())
    return 2e-4 * math.sqrt(1e6 / weights) * (10.0 if policy.is_adapter else 1.0)


def batch_indices(rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The rows of batch `step` (from 0): every epoch is a new seeded permutation, and batches run on over its end.

    A function of its arguments alone, so the data position is the step number and nothing can get lost in a resume.
    """
    picked, orders = [], {}
    for i in range(step * batch_size, (step + 1) * batch_size):
        epoch = i // rows
        if epoch not in orders:
            orders[epoch] = torch.randperm(rows, generator=torch.Generator().manual_seed(_step_seed(seed, -epoch - 1)))
        picked.append(int(orders[epoch][i % rows]))
    return picked


def _step_seed(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % 2**63


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


def schedule_factor(config: TrainConfig, step: int) -> float:
    """Share of the peak learning rate at `step` (from 0): like the data position a function of the step, not a
    state."""
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    done = min(1.0, step / config.steps)
    return (
        warm
        * {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    )


def _check(config: TrainConfig) -> None:
    for name in (
        "steps",
        "batch_size",
        "group_size",
        "minibatches",
        "micro_batch_tokens",
        "checkpoint_every",
        "keep_checkpoints",
    ):
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be >= 1, got {getattr(config, name)}")
    if config.group_size == 1 and recipe(config.method).advantage not in ("reinforce", "sign"):
        raise UserError(
            f"group_size=1 leaves {config.method} nothing to compare: every advantage would be 0; use 2 or more"
        )
    if config.temperature <= 0:
        raise UserError(f"temperature must be > 0 to train, got {config.temperature}: greedy rollouts are all the same")
    if config.beta < 0 or (config.lr is not None and config.lr <= 0):
        raise UserError(f"beta must be >= 0 and lr > 0, got beta={config.beta}, lr={config.lr}")
    if config.schedule not in ("constant", "linear", "cosine"):
        raise UserError(f"unknown schedule {config.schedule!r}; choose constant, linear or cosine")
    if config.resume and config.out is None:
        raise UserError("resume=True needs out=..., the folder of the run to go on with")


def _check_context(policy: Policy, prompts: list[list[int]], max_new_tokens: int) -> None:
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens > policy.context_length:
        raise UserError(
            f"the longest of {len(prompts)} training prompts has {longest} tokens; "
            f"with max_new_tokens={max_new_tokens} that passes the model's context of "
            f"{policy.context_length}: lower max_new_tokens or leave long prompts out"
        )


def _prepare_folder(config: TrainConfig, out: Path | None, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Make or resume the run's folder; returns the number of steps already done."""
    if out is None:
        return 0
    settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    out.mkdir(parents=True, exist_ok=True)
    found = checkpoint.latest(out / "checkpoints")
    if not config.resume:
        if found is not None:
            raise UserError(
                f"{out} already holds a run up to {found.name}: set resume to go on with it, or choose another folder"
            )
        checkpoint.check_space(out, policy, config.keep_checkpoints)
        (out / "config.json").write_text(json.dumps(settings, indent=1))
        return 0
    if found is None:
        raise UserError(f"nothing to resume: there is no checkpoint in {out / 'checkpoints'}")
    before = json.loads((out / "config.json").read_text())
    changed = [k for k in settings if k not in _FREE and before.get(k) != settings[k]]
    if config.schedule != "constant" and before.get("steps") != settings["steps"]:
        changed.append("steps")
    if changed:
        k = changed[0]
        raise UserError(f"cannot resume {out} as another run: {k} was {before.get(k)!r} and is now {settings[k]!r}")
    return int(checkpoint.load_checkpoint(found, policy, optimizer)["step"])


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual. Off the main thread it is never set."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def ask_to_stop(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, ask_to_stop)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
