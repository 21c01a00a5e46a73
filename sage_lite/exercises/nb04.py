"""Exercises of notebook 04: dead groups, the loss of one step, unbiased pass@k, shares of the gradient budget."""

from __future__ import annotations

from math import comb

import numpy as np
import torch
from torch import Tensor

from sage_lite import update
from sage_lite.budget import BINS, GradientBudget
from sage_lite.evaluation import pass_at_k
from sage_lite.exercises import agree, exercise
from sage_lite.losses import policy_loss

# -- 04.1 ----------------------------------------------------------------------------------------------------------


def _dead_share(rewards: Tensor) -> Tensor:
    return (rewards.max(-1).values == rewards.min(-1).values).float().mean()


_DEAD_MISTAKES = {
    "groups in which all rollouts succeed are dead too": lambda r: (r.sum(-1) == 0).float().mean(),
    "groups in which all rollouts fail are dead too": lambda r: (r.mean(-1) == 1).float().mean(),
    "that is the share of groups which do teach something": lambda r: 1 - _dead_share(r),
    "compare within each group, along the last axis": lambda r: (r.max(0).values == r.min(0).values).float().mean(),
}


@exercise("04.1", "Count the dead groups", difficulty=1, minutes=5, solution=_dead_share,
          wrong=[(wrong, message) for message, wrong in _DEAD_MISTAKES.items()])
def _check_dead_share(answer) -> None:
    generator = torch.Generator().manual_seed(0)
    cases = [((torch.rand(groups, 4, generator=generator) < 0.75).float(),) for groups in (40, 25)]
    cases.append((torch.tensor([[0.3, 0.3, 0.3], [0.0, 0.0, 0.5], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),))
    agree(answer, lambda r: update.dead_groups(r).float().mean(), cases, names=["rewards"], mistakes=_DEAD_MISTAKES)


# -- 04.2 ----------------------------------------------------------------------------------------------------------


def _token_mean(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -(advantages[:, None] * logprobs * mask).sum() / mask.sum()


_LOSS_MISTAKES = {
    "the optimizer minimises: the loss needs a minus sign": lambda lp, a, m: -_token_mean(lp, a, m),
    "dead tokens count: multiply by the mask": lambda lp, a, m: -(a[:, None] * lp).sum() / m.sum(),
    "divide by the live tokens, not by all of them": lambda lp, a, m: -(a[:, None] * lp * m).mean(),
    "that is the sequence mean: divide once, by all live tokens": lambda lp, a, m: -(
        a * (lp * m).sum(-1) / m.sum(-1)).mean(),
}


def _library_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """What policy_loss's gradient at ratio 1 says: CISPO with no bound reached is A log pi, token mean."""
    return policy_loss(logprobs, logprobs.detach(), advantages, mask, kind="cispo")[0]


@exercise("04.2", "Write the loss of the first step", difficulty=2, minutes=10, solution=_token_mean,
          wrong=[(wrong, message) for message, wrong in _LOSS_MISTAKES.items()])
def _check_token_mean(answer) -> None:
    cases = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 6, (4, 1), generator=generator)
        mask = torch.arange(5) < lengths
        logprobs = -torch.rand(4, 5, generator=generator)
        cases.append((logprobs, torch.randn(4, generator=generator), mask))
    agree(answer, _library_loss, cases, names=["logprobs", "advantages", "mask"], mistakes=_LOSS_MISTAKES)


# -- 04.3 ----------------------------------------------------------------------------------------------------------


def _unbiased(n: int, c: int, k: int) -> float:
    return 1 - comb(n - c, k) / comb(n, k)


_PASS_MISTAKES = {
    "1 - (1 - c/n)^k draws with replacement and is too low on average": lambda n, c, k: 1 - (1 - c / n) ** k,
    "that is the probability that all k fail": lambda n, c, k: comb(n - c, k) / comb(n, k),
    "that is the probability that all k succeed": lambda n, c, k: comb(c, k) / comb(n, k),
}


@exercise("04.3", "Estimate pass@k without bias", difficulty=2, minutes=10, solution=_unbiased,
          wrong=[(wrong, message) for message, wrong in _PASS_MISTAKES.items()])
def _check_pass_at_k(answer) -> None:
    cases = [(16, 3, 4), (16, 15, 2), (10, 5, 1), (8, 7, 3), (16, 0, 16), (16, 1, 16)]
    agree(answer, pass_at_k, cases, names=["n", "c", "k"], mistakes=_PASS_MISTAKES)


# -- 04.4 ----------------------------------------------------------------------------------------------------------


def _shares(pass_rate: np.ndarray, norms: np.ndarray) -> np.ndarray:
    edges = [0, 0.2, 0.5, 0.7, 0.9, 1.01]
    return np.array([norms[(pass_rate >= a) & (pass_rate < b)].sum() for a, b in zip(edges, edges[1:])]) / norms.sum()


def _counts(pass_rate: np.ndarray, norms: np.ndarray) -> np.ndarray:
    return _shares(pass_rate, np.ones_like(norms))


def _open_end(pass_rate: np.ndarray, norms: np.ndarray) -> np.ndarray:
    return np.histogram(pass_rate[pass_rate < 1], BINS, weights=norms[pass_rate < 1])[0] / norms.sum()


_SHARE_MISTAKES = {
    "that is the share of problems: weigh each by its gradient norm": _counts,
    "p = 1 belongs to the last bin": _open_end,
    "shares must sum to one: divide by the sum of all norms": lambda p, g: _shares(p, g) * g.sum(),
}


@exercise("04.4", "Split the gradient budget", difficulty=2, minutes=10, solution=_shares,
          wrong=[(wrong, message) for message, wrong in _SHARE_MISTAKES.items()])
def _check_shares(answer) -> None:
    cases = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        cases.append((np.append(rng.random(60), [0.0, 0.2, 0.5, 0.7, 0.9, 1.0]), rng.random(66) + 0.1))

    def reference(pass_rate, norms):
        return np.array([share.value for share in GradientBudget(pass_rate, {"g": norms[:, None]}).shares("g")])

    agree(answer, reference, cases, names=["pass_rate", "norms"], mistakes=_SHARE_MISTAKES)
