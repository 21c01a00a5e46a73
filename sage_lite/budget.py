"""The gradient budget: how much of a frozen policy's gradient each advantage spends on easy and on hard problems."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Callable, Mapping

import numpy as np
import torch

from sage_lite import advantages as adv
from sage_lite.checks import probability
from sage_lite.errors import UserError
from sage_lite.evaluation import Interval, bootstrap
from sage_lite.logprobs import completion_logprobs
from sage_lite.policy import Policy
from sage_lite.rewards import score_all
from sage_lite.rollout import Rollouts, sample
from sage_lite.tasks import Task
from sage_lite.update import group_advantages

BINS = (0.0, 0.2, 0.5, 0.7, 0.9, 1.0)  # [0,.2) [.2,.5) [.5,.7) [.7,.9) [.9,1]
CHUNK = 32  # prompts sampled at a time


@dataclass
class GradientBudget:
    """Gradient norms of single groups, with the pass rate that they are binned by.

    pass_rate [N]: from samples that are independent of the groups. norms: by advantage name, [N, groups], each
    `|| (1/M) sum_i A_i grad log pi(rollout i) ||`, without clip and KL.
    """

    pass_rate: np.ndarray
    norms: dict[str, np.ndarray]

    @property
    def bins(self) -> np.ndarray:
        """Bin of each problem, 0 to 4."""
        return np.clip(np.digitize(self.pass_rate, BINS[1:-1]), 0, len(BINS) - 2)

    def shares(self, name: str) -> list[Interval]:
        """Share of the summed norm in each p-bin for one advantage, with bootstrap intervals over problems."""
        table = np.stack([self.bins, self.norms[name].mean(-1)], -1)
        return [bootstrap(table, lambda t, b=b: _share(t, b)) for b in range(len(BINS) - 1)]


def _share(table: np.ndarray, bin_: int) -> float:
    total = table[:, 1].sum()
    return float(table[table[:, 0] == bin_, 1].sum() / total) if total > 0 else float("nan")


def gradient_budget(
    policy: Policy,
    task: Task,
    rows: list[dict],
    advantages: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | list[str],
    *,
    group_size: int = 8,
    groups: int = 1,
    rate_samples: int = 64,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    pass_rate: np.ndarray | None = None,
) -> GradientBudget:
    """Measure the budget on a frozen policy: every advantage is applied to the very same groups of rollouts.

    rows: N problems. advantages: names, or a dict of callables. Each problem's p comes from `rate_samples` >= 64
    samples drawn independently of its groups (or is given, [N]): binning by the group's own k/M would sort the groups
    by the very noise that makes their gradient large. A sample whose grader fails is left out of p, and of its group; a
    group without a usable reward counts 0. Raises UserError without rows, for a problem of which no sample could be
    graded, and for a pass_rate that is not one number in [0, 1] for each row.
    """
    if not rows:
        raise UserError("gradient_budget needs at least one problem, got no rows")
    if pass_rate is not None:
        pass_rate = _given(pass_rate, len(rows))
    if rate_samples < 64 and pass_rate is None:
        raise UserError(f"rate_samples must be >= 64 for a usable pass rate, got {rate_samples}")
    functions = {n: adv.get(n) for n in advantages} if not isinstance(advantages, Mapping) else dict(advantages)
    style = policy.prompt_style if policy.prompt_style in task.styles else task.styles[0]
    prompts = policy.encode([task.prompt(row, style) for row in rows])
    length = max_new_tokens or task.default_max_new_tokens(style)
    generator = torch.Generator(policy.device).manual_seed(seed)
    settings = {"max_new_tokens": length, "temperature": temperature, "generator": generator}

    def draw(chunk: list[int], size: int) -> tuple[Rollouts, torch.Tensor]:
        out = sample(policy, [prompts[i] for i in chunk], size, **settings)
        scored, _, _ = score_all(task.score, out.texts, [rows[i] for i in chunk for _ in range(size)])
        return out, torch.tensor([float("nan") if r is None else r for r in scored]).view(len(chunk), size)

    chunks = [list(range(i, min(i + CHUNK, len(rows)))) for i in range(0, len(rows), CHUNK)]
    if pass_rate is None:
        pass_rate = _pass_rate(torch.cat([draw(chunk, rate_samples)[1] for chunk in chunks]))
    norms = {name: np.zeros((len(rows), groups)) for name in functions}
    parameters = [p for _, p in policy.trainable()]
    for chunk in chunks:
        out, rewards = draw(chunk, groups * group_size)
        members = torch.arange(len(out.texts)).view(len(chunk), groups, group_size)
        for i, g in itertools.product(range(len(chunk)), range(groups)):
            group = rewards.flatten()[members[i, g]]
            values = {name: group_advantages(f, group[None])[0].double() for name, f in functions.items()}
            if not any(bool(v.any()) for v in values.values()):
                continue  # a dead group: every norm is 0
            levels, gram = _level_gradients(policy, out, members[i, g], group, parameters, temperature)
            for name in functions:
                weights = torch.stack([values[name][group == level][0] for level in levels])
                norms[name][chunk[i], g] = float((weights @ gram @ weights).clamp(min=0).sqrt()) / group_size
    return GradientBudget(pass_rate, norms)


def _given(pass_rate: np.ndarray, rows: int) -> np.ndarray:
    found = probability("pass_rate", pass_rate)
    if found.shape != (rows,):
        raise UserError(f"pass_rate must be [{rows}], one number a problem, got shape {found.shape}")
    return found


def _pass_rate(rewards: torch.Tensor) -> np.ndarray:
    """Share of right samples (reward >= 1) among the graded ones, [N, samples] -> [N]; in float64, where 90/100 is 0.9
    and lies in the last bin."""
    graded = (~rewards.isnan()).sum(-1)
    if not graded.all():
        raise UserError(
            f"no sample of problem {int((graded == 0).nonzero()[0])} could be graded: leave it out of rows, or mend "
            "the task's scorer"
        )
    return ((rewards >= 1.0).sum(-1).double() / graded).numpy()


def _level_gradients(
    policy: Policy, out: Rollouts, rows: torch.Tensor, rewards: torch.Tensor, parameters: list, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct reward levels of a group, and the Gram matrix of their summed gradients `sum_{i at level} grad log pi`.

    Rollouts with equal rewards have equal advantages, so any advantage's gradient is a combination of these few
    vectors: one backward pass a level serves every advantage.
    """
    levels = torch.unique(rewards[~rewards.isnan()])
    rows = rows.to(out.completions.device)
    logp = completion_logprobs(
        policy.causal_lm, out.prompts, out.completions[rows], out.mask[rows], out.group[rows], pad_id=policy.pad_id,
        temperature=temperature,
    ).sum(-1)  # fmt: skip
    vectors = []
    for j, level in enumerate(levels):
        total = logp[(rewards == level).to(logp.device)].sum()
        grads = torch.autograd.grad(total, parameters, retain_graph=j + 1 < len(levels), allow_unused=True)
        vectors.append(
            torch.cat([torch.zeros_like(p).flatten() if x is None else x.flatten() for x, p in zip(grads, parameters)])
        )
    matrix = torch.stack(vectors).float()
    return levels, (matrix @ matrix.T).double().cpu()
