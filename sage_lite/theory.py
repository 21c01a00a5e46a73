"""What an advantage does to a prompt of pass rate p, measured on the very function that trains the model.

For 0/1 rewards a group of M rollouts is its number of successes k, so any advantage is a table of M + 1 rows.
Everything here is an exact expectation over that table. `advantage` is always a name (then with the registry's default
parameters: "grpo" has eps = 1e-4), a callable `rewards[..., M] -> advantages[..., M]`, or a finished `BinaryTable`.
`pass_rate` is a number or an array in [0, 1]; the result has its shape (a float for a number), float64. All functions
raise UserError for a pass rate outside [0, 1] and for a group size that is no whole number >= 1.

The formulas of the paper stand in `sage_lite.closed_forms`; tests hold them against this module.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from sage_lite import advantages, checks
from sage_lite.errors import UserError

_CHUNK = 2**16  # numbers a block of groups, or of binomial probabilities, holds: half a MB, about a core's cache
_GROUPS = 8  # groups on which the symmetry of a function is tried


class BinaryTable(NamedTuple):
    """Advantage of a success and of a failure in a group with k successes, k = 0..M.

    Both are float64 of length M + 1, indexed by k. The entries no group has, success[0] and failure[M], are 0.
    """

    success: NDArray[np.float64]
    failure: NDArray[np.float64]

    @property
    def group_size(self) -> int:
        return len(self.success) - 1

    @property
    def gain(self) -> NDArray[np.float64]:
        """success[s + 1] - failure[s], s = 0..M-1: what succeeding is worth to one rollout if s of the others do."""
        return self.success[1:] - self.failure[:-1]


Measurable = str | Callable[..., torch.Tensor] | BinaryTable


def binary_table(advantage: Measurable, group_size: int) -> BinaryTable:
    """Table of an advantage on 0/1 rewards, by calling the function itself on the M + 1 groups (float64).

    Raises UserError if the function returns another shape or a value that is not finite, if it gives the successes
    (or failures) of a group different values, or if a group's advantages depend on the order or on other groups.
    """
    m = checks.group_size(group_size)
    if isinstance(advantage, BinaryTable):
        if advantage.group_size != m:
            raise UserError(f"the table was made for group_size {advantage.group_size}, got group_size {m}")
        return advantage
    success, failure = np.zeros(m + 1), np.zeros(m + 1)
    step = max(1, _CHUNK // m)
    for start in range(0, m + 1, step):
        k = np.arange(start, min(start + step, m + 1))
        a, won = _call(advantage, k, m)
        success[k], failure[k] = np.where(k > 0, a[:, 0], 0.0), np.where(k < m, a[:, -1], 0.0)
        _compare(a, won, k, success, failure, "equal rollouts of one group get different values")
    some, order = checks.spread(m + 1, _GROUPS), checks.orders(m)
    for k in some[:, None]:
        _compare(*_call(advantage, k, m), k, success, failure,
                 "it depends on other groups: reduce over the last axis, r.mean(-1, keepdim=True)")
    k = some.repeat(len(order))
    _compare(*_call(advantage, k, m, np.tile(order, (len(some), 1))), k, success, failure,
             "it depends on the order of the rollouts")
    return BinaryTable(success, failure)


def prompt_weight(advantage: Measurable, pass_rate: ArrayLike, group_size: int) -> float | NDArray[np.float64]:
    """w(p): the expected on-policy gradient of a prompt is w(p) grad p.

    w(p) = E[success[S+1] - failure[S]] with S ~ Binomial(M - 1, p) the successes among the other rollouts.
    """
    return _binomial_mean(binary_table(advantage, group_size).gain, pass_rate)


def objective(advantage: Measurable, pass_rate: ArrayLike, group_size: int) -> float | NDArray[np.float64]:
    """h(p) = integral of w from 0 to p: the objective that the expected update climbs.

    h(p) = E[sum_{s<K} gain[s]] / M with K ~ Binomial(M, p), the integral of w term by term; for any advantage.
    """
    table = binary_table(advantage, group_size)
    return _binomial_mean(np.append(0.0, table.gain.cumsum()) / table.group_size, pass_rate)


def mean_abs_advantage(advantage: Measurable, pass_rate: ArrayLike, group_size: int) -> float | NDArray[np.float64]:
    """E|A| of a rollout, over groups: the size of the signal. 2 p (1 - p) w(p) if every group sums to zero."""
    table = binary_table(advantage, group_size)
    share = np.arange(table.group_size + 1) / table.group_size
    return _binomial_mean(share * abs(table.success) + (1 - share) * abs(table.failure), pass_rate)


def gradient_budget_proxy(advantage: Measurable, pass_rate: ArrayLike, group_size: int) -> float | NDArray[np.float64]:
    """2 p (1 - p) w(p): a prompt's share of the gradient, up to a constant, if |grad log pi| is alike everywhere."""
    p = checks.probability("pass_rate", pass_rate)
    return 2.0 * p * (1.0 - p) * prompt_weight(advantage, pass_rate, group_size)


def degenerate_probability(pass_rate: ArrayLike, group_size: int) -> float | NDArray[np.float64]:
    """Probability that all M rewards of a group are equal: p^M + (1 - p)^M."""
    p, m = checks.probability("pass_rate", pass_rate), checks.group_size(group_size)
    return (p**m + (1.0 - p) ** m)[()]


def _call(advantage: str | Callable[..., torch.Tensor], k: np.ndarray, m: int, order: np.ndarray | None = None
          ) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and the mask of successes, both [len(k), m], of groups whose first k rollouts succeed, in `order`."""
    won = np.arange(m) < k[:, None]
    won = won if order is None else np.take_along_axis(won, order, axis=-1)
    return advantages.apply(advantage, torch.from_numpy(won.astype(np.float64))).numpy(), won


def _compare(a: np.ndarray, won: np.ndarray, k: np.ndarray, success: np.ndarray, failure: np.ndarray,
             why: str) -> None:
    """UserError with `why` unless advantages `a` of groups with k successes are the table's (to float32 rounding)."""
    tolerance = 1e-5 * np.maximum(abs(success[k]), abs(failure[k]))[:, None]
    expected = np.where(won, success[k, None], failure[k, None])
    bad = abs(a - expected) > tolerance
    if bad.any():
        i, j = np.argwhere(bad)[0]
        raise UserError(f"the advantage is no function of a rollout's reward and its group's successes: for k = {k[i]} "
                        f"a {'success' if won[i, j] else 'failure'} got {expected[i, j]:.6g} and {a[i, j]:.6g}; {why}")


def _binomial_mean(values: np.ndarray, pass_rate: ArrayLike) -> float | NDArray[np.float64]:
    """E[values[K]], K ~ Binomial(n, pass_rate), n = len(values) - 1: a Bernstein polynomial."""
    p = checks.probability("pass_rate", pass_rate)
    n = len(values) - 1
    k = np.arange(n + 1.0)
    log_choose = gammaln(n + 1.0) - gammaln(k + 1.0) - gammaln(n - k + 1.0)
    with np.errstate(divide="ignore"):  # -1e4 for log 0: below every exponent that matters, and 0 * -1e4 is 0
        log_p, log_q = np.maximum(np.log(p.ravel()), -1e4), np.maximum(np.log1p(-p.ravel()), -1e4)
    exponents, columns = np.stack([k, n - k, log_choose]), np.stack([values, np.ones_like(values)], axis=1)
    logs = np.stack([log_p, log_q, np.ones_like(log_p)], axis=1)
    out = np.empty(p.size)
    step = max(1, _CHUNK // (n + 1))
    for i in range(0, p.size, step):
        pmf = logs[i:i + step] @ exponents
        mean, total = (np.exp(pmf, out=pmf) @ columns).T  # total is 1 up to a rounding that mean has, too
        out[i:i + step] = mean / total
    return out.reshape(p.shape)[()]
