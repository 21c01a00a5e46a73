"""Rewards that are not just 0 or 1: what a group advantage does when the answers of a prompt have several levels.

With L reward levels a rollout's view of its group is how many of the M - 1 others lie on each level. So any advantage
is a finite table again, obtained by calling the very function that trains, and every expectation is an exact sum. With
V_a(pi) the mean advantage of level a, the expected update of a prompt is the form sum_a V_a dpi_a on the simplex; it
is the gradient of an objective only if its integral along a path depends on nothing but the ends. `theory` is the case
of two levels, where this always holds. Bad values raise UserError.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, xlogy
from torch import Tensor

from sage_lite import advantages, checks
from sage_lite.errors import UserError

MAX_NUMBERS = 20_000_000  # rewards in the list of all groups: a table takes some hundred MB at most

Array = NDArray[np.float64]


class LevelTable(NamedTuple):
    """Advantage of a rollout on each of L levels, for every way in which the M - 1 others can fall.

    counts [C, L]: how many of the others lie on each level; log_ways [C]: log of the number of orders of such others;
    advantage [C, L]: what a rollout on level a gets beside them. All float64.
    """

    counts: Array
    log_ways: Array
    advantage: Array

    @property
    def group_size(self) -> int:
        return int(self.counts[0].sum()) + 1


def level_table(
    advantage: str | Callable[..., Tensor], rewards: Tensor | Sequence[float], group_size: int
) -> LevelTable:
    """Table of `advantage` (a name or a callable) for answers worth `rewards[L]` in groups of M.

    It has C = binomial(M + L - 2, L - 1) rows. Raises UserError where that would be too many to list, where the
    function returns another shape or a value that is not finite, and where a group's advantages depend on the order of
    its rollouts or on other groups (tried on a few groups).
    """
    m = checks.group_size(group_size)
    r = checks.reward_groups(rewards, double=True)
    if r.dim() != 1:
        raise UserError(f"rewards[L] must be one number a level, got shape {tuple(r.shape)}")
    levels = len(r)
    rows = math.comb(m + levels - 2, levels - 1)
    if rows * levels * m > MAX_NUMBERS:
        raise UserError(f"{levels} levels in groups of {m} make {rows} kinds of groups, too many to list: "
                        "use fewer levels or a smaller group")
    counts = _compositions(m - 1, levels)
    others = r.repeat(rows, 1).flatten().repeat_interleave(torch.from_numpy(counts).flatten()).view(rows, m - 1)
    own = r.repeat(rows, 1)[..., None]
    groups = torch.cat([own, others[:, None].expand(rows, levels, m - 1)], dim=-1)
    values = advantages.apply_symmetric(advantage, groups)[..., 0].numpy()
    log_ways = gammaln(m) - gammaln(counts + 1.0).sum(-1)
    return LevelTable(counts.astype(np.float64), log_ways, values)


def level_values(table: LevelTable, probs: ArrayLike) -> Array:
    """V[..., L]: the mean advantage of each level when the policy puts `probs[..., L]` on them (they sum to 1)."""
    pi = checks.probability("probs", probs)
    return np.exp(_log_chance(table, pi)) @ table.advantage


def expected_update(table: LevelTable, probs: ArrayLike) -> Array:
    """The expected on-policy update of the logits, [..., L], at a softmax policy `probs[..., L]`.

    Minus the loss gradient: pi_a (V_a - sum_b pi_b V_b), the form sum_a V_a dpi_a pulled back through the softmax.
    """
    pi, v = checks.probability("probs", probs), level_values(table, probs)
    return pi * (v - (pi * v).sum(-1, keepdims=True))


def work(table: LevelTable, path: ArrayLike) -> Array:
    """Integral of sum_a V_a dpi_a along the straight segments of `path[T, L]`, cumulated: [T], the first entry 0.

    Exact up to rounding (V is a polynomial of degree M - 1 on a segment, integrated by Gauss-Legendre). Along a closed
    path the last entry is 0 if the update is the gradient of an objective.
    """
    points = checks.probability("path", path)
    nodes, weights = np.polynomial.legendre.leggauss(table.group_size // 2 + 1)
    start, step = points[:-1, None], np.diff(points, axis=0)[:, None]
    slope = (level_values(table, start + step * (nodes[:, None] + 1.0) / 2.0) * step).sum(-1)
    return np.append(0.0, (slope @ weights / 2.0).cumsum())


def gaussian_log_mgf(mean: float, std: float, tau: float) -> float:
    """log E[exp(R / tau)] for a Gaussian reward: mean / tau + std^2 / (2 tau^2)."""
    tau, mean = checks.number("tau", tau, above=0.0), checks.number("mean", mean)
    with np.errstate(over="ignore", invalid="ignore"):
        value = mean / tau + np.float64(checks.number("std", std, at_least=0.0) / tau) ** 2 / 2.0
    if not math.isfinite(value):
        raise UserError(f"log E[exp(R / tau)] leaves float64's range for mean {mean:g}, std {std:g} and tau {tau:g}: "
                        "use a larger tau")
    return float(value)


def softmax_sample_size(rewards: Tensor, tau: float) -> Tensor:
    """1 / sum_i q_i^2 for the weights q = softmax(rewards[..., M] / tau): the rollouts they amount to, from 1 to M."""
    rewards = checks.reward_groups(rewards)
    q = (1.0 + advantages.sage(rewards, tau)) / rewards.shape[-1]
    return 1.0 / q.square().sum(-1)


def match_tau(rewards: Tensor, target: float) -> float:
    """The tau at which one group `rewards[M]` has the softmax sample size `target`.

    The size grows with tau, from the number of best rollouts to M; UserError outside that range, ends excluded. For
    0/1 rewards it is `closed_forms.adaptive_tau`.
    """
    r = checks.reward_groups(rewards, double=True)
    if r.dim() != 1:
        raise UserError(f"match_tau takes one group, rewards[M], got shape {tuple(r.shape)}: call it group by group")
    best, m, target = int((r == r.max()).sum()), r.shape[-1], checks.number("target", target)
    if not best < target < m:
        raise UserError(f"the sample size of this group lies between {best} and {m}, got a target of {target:g}")
    spread = float(r.max() - r.min())
    gap = lambda log_tau: float(softmax_sample_size(r, math.exp(log_tau) * spread)) - target  # noqa: E731
    return spread * math.exp(brentq(gap, -40.0, 40.0, xtol=1e-13))


def _compositions(total: int, parts: int) -> NDArray[np.int64]:
    """All ways [C, parts] to write `total` as an ordered sum of whole numbers >= 0."""
    if parts == 1:
        return np.array([[total]])
    blocks = [_compositions(total - first, parts - 1) for first in range(total + 1)]
    return np.concatenate([np.insert(block, 0, first, axis=1) for first, block in enumerate(blocks)])


def _log_chance(table: LevelTable, pi: Array) -> Array:
    """Log-probability [..., C] of each row's others under pi[..., L]; 0 log 0 counts as 0."""
    if pi.shape[-1:] != table.counts.shape[-1:]:
        raise UserError(f"probs need one entry for each of the {table.counts.shape[-1]} levels, got shape {pi.shape}")
    if not np.allclose(pi.sum(-1), 1.0):
        raise UserError(f"probs must sum to 1 over the levels, got a sum of {pi.sum(-1).flat[0]:g}")
    return table.log_ways + xlogy(table.counts, pi[..., None, :]).sum(-1)
