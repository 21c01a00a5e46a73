"""The formulas on paper: closed forms of w(p), their limits, and counting facts about groups of 0/1 rewards.

`sage_lite.theory` measures the same things on the functions that train; nothing there uses this module. Tests and
notebooks hold one against the other. The letters are the paper's: M = group_size, c = exp(1/tau) and, since c leaves
the range of a double below tau = 0.0014, q = exp(-1/tau) in the code. Bad values raise UserError.
"""
from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import xlog1py

from sage_lite import checks
from sage_lite.errors import UserError

Array = float | NDArray[np.float64]


def pseudo_count(group_size: int, tau: float) -> float:
    """lambda = M / (exp(1/tau) - 1): SAGE is MaxRL with lambda pseudo-successes, kappa(k) = 1 / (k + lambda)."""
    q, one_minus_q = _q(tau)
    return checks.group_size(group_size) * q / one_minus_q


def kappa(name: str, group_size: int, *, tau: float = 0.1, gamma: float = 1.0, ddof: int = 0) -> NDArray[np.float64]:
    """kappa(k) = (success[k] - failure[k]) / M for k = 1..M-1, float64 of length M - 1 (GRPO and F-GRPO: eps = 0).

    For a zero-sum advantage w(p) = (M - 1) E[kappa(T + 1)], T ~ Binomial(M - 2, p). Raises UserError for a name
    without such a form (`reinforce` and `sign` are not zero-sum: there w is 1 and 2).
    """
    m = checks.group_size(group_size)
    gamma, ddof = checks.number("gamma", gamma, at_least=0.0), checks.std_ddof(ddof)
    k = np.arange(1.0, m)
    forms = {
        "sage": lambda: 1.0 / (k + pseudo_count(m, tau)),
        "maxrl": lambda: 1.0 / k,
        "rloo": lambda: np.full(m - 1, 1.0 / (m - 1)) if m > 1 else k,
        "dr_grpo": lambda: np.full(m - 1, 1.0 / m),
        "grpo": lambda: np.sqrt((m - ddof) / m / (k * (m - k))),
        "focal_grpo": lambda: (1.0 - k / m) ** gamma * np.sqrt((m - ddof) / m / (k * (m - k))),
    }
    if name not in forms:
        raise UserError(f"no closed form of kappa for {name!r}; known: {', '.join(forms)}")
    return forms[name]()


def sage_delta(group_size: int, tau: float) -> NDArray[np.float64]:
    """The paper's Delta_s, s = 0..M-1, float64 of length M: w(p) = E[Delta_S], S ~ Binomial(M - 1, p).

    Delta_s = M (c-1) (M-1 + s(c-1)) / ((M + s(c-1)) (M + (s+1)(c-1))). Source: SAGE, arXiv 2608.09271.
    """
    m = checks.group_size(group_size)
    q, d = _q(tau)  # numerator and denominator times q^2; c - 1 becomes d = 1 - q
    s = np.arange(1.0, m)
    ratio = np.append((m - 1) / m, (q * (m - 1) + s * d) / (q * m + s * d))  # s = 0 apart: q may be 0
    return m * d * ratio / (q * m + np.arange(1.0, m + 1) * d)


def sage_weight_ends(group_size: int, tau: float) -> tuple[float, float]:
    """SAGE's w(0) = (M-1)(c-1) / (M+c-1) and w(1) = 1 - M / (1 + (M-1)c) = (M-1)(c-1) / (1 + (M-1)c)."""
    m = checks.group_size(group_size)
    q, d = _q(tau)
    return ((m - 1) * d / (m * q + d), (m - 1) * d / (q + m - 1)) if m > 1 else (0.0, 0.0)


def sage_large_group_weight(pass_rate: ArrayLike, tau: float) -> Array:
    """M -> infinity: w(p) = (c-1) / (1 - p + pc). At p = 0 this is c - 1: infinite in float64 below tau = 0.0014."""
    p = checks.probability("pass_rate", pass_rate)
    q, d = _q(tau)
    with np.errstate(divide="ignore"):
        return (d / ((1.0 - p) * q + p))[()]


def sage_large_group_objective(pass_rate: ArrayLike, tau: float) -> Array:
    """M -> infinity: h(p) = log(1 - p + pc), the log of the mean of exp(reward / tau)."""
    p, tau = checks.probability("pass_rate", pass_rate), checks.number("tau", tau, above=0.0)
    if tau > 1.0:  # c is near 1: the other line would cancel
        return np.log1p(p * math.expm1(1.0 / tau))[()]
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-p), np.log(p) + 1.0 / tau)[()]


def maxrl_weight(pass_rate: ArrayLike, terms: int) -> Array:
    """w(p) = (1 - (1-p)^T) / p, T = `terms`. SAGE tends to it with T = M - 1 as tau -> 0; MaxRL has it exactly."""
    p, terms = checks.probability("pass_rate", pass_rate), checks.whole("terms", terms, 0)
    positive = np.where(p > 0.0, p, 1.0)
    return np.where(p > 0.0, -np.expm1(xlog1py(terms, -positive)) / positive, terms)[()]


def maxrl_objective(pass_rate: ArrayLike, terms: int) -> Array:
    """h(p) = sum_{j=1}^{T} (1 - (1-p)^j) / j, which is log p cut after T = `terms` terms, plus a constant."""
    p, terms = checks.probability("pass_rate", pass_rate), checks.whole("terms", terms, 0)
    j = np.arange(1.0, terms + 1)
    return (-np.expm1(xlog1py(j, -p[..., None])) / j).sum(-1)[()]


def sage_flat_weight(group_size: int, tau: float) -> float:
    """tau -> infinity: w -> (M-1) / (M tau), Dr. GRPO's divided by tau. A large tau is also a small step size."""
    m = checks.group_size(group_size)
    return (m - 1) / m / checks.number("tau", tau, above=0.0)


def effective_sample_size(successes: int, group_size: int, tau: float) -> float:
    """Rollouts that SAGE's softmax weights amount to: (kc + M-k)^2 / (kc^2 + M-k), between k and M; M for k = 0."""
    k, m = _successes(successes, group_size)
    q, _ = _q(tau)
    return (k + (m - k) * q) ** 2 / (k + (m - k) * q * q) if k else float(m)


def adaptive_tau(successes: int, group_size: int, target: float) -> float:
    """The tau at which `effective_sample_size` is `target`: 1 / log c, c = [k(M-k) + sqrt(k(M-k)v(M-v))] / (k(v-k)).

    Needs 0 < k < M and k < v = target <= M (inf at v = M), else UserError: no tau gives another size.
    """
    k, m = _successes(successes, group_size)
    v = checks.number("target", target)
    if not 0 < k < m:
        raise UserError(f"with {k} successes of {m} every tau gives an effective sample size of {m}")
    if not k < v <= m:
        raise UserError(f"with {k} successes the effective sample size lies in ({k}, {m}], got a target of {v:g}")
    # c - 1 directly, so that a target near M (c near 1) loses nothing
    c_minus_1 = (k * (m - v) + math.sqrt(k * (m - k) * v * (m - v))) / (k * (v - k))
    return 1.0 / math.log1p(c_minus_1) if c_minus_1 > 0.0 else math.inf


def tail_miss(pass_rate: ArrayLike, rare_mass: ArrayLike, group_size: int) -> Array:
    """Probability that a group has both rewards and yet misses a rare correct answer of probability q <= p.

    (1-q)^N - (1-p)^N - (p-q)^N, N = group_size: no rare answer, less the groups that are all wrong or all right.
    """
    p, q = checks.probability("pass_rate", pass_rate), checks.probability("rare_mass", rare_mass)
    n = checks.group_size(group_size)
    try:
        p, q = np.broadcast_arrays(p, q)
    except ValueError:
        raise UserError(f"pass_rate and rare_mass must have one shape or shapes that broadcast, "
                        f"got {p.shape} and {q.shape}") from None
    if (q > p).any():
        raise UserError(f"rare_mass is part of pass_rate and cannot exceed it, got {rare_mass!r} of {pass_rate!r}")
    return ((1.0 - q) ** n - (1.0 - p) ** n - (p - q) ** n)[()]


def _q(tau: float) -> tuple[float, float]:
    """exp(-1/tau) and 1 - exp(-1/tau), both without cancellation."""
    tau = checks.number("tau", tau, above=0.0)
    return math.exp(-1.0 / tau), -math.expm1(-1.0 / tau)


def _successes(successes: int, group_size: int) -> tuple[int, int]:
    m = checks.group_size(group_size)
    k = checks.number("successes", successes)
    if not (0 <= k <= m and k == int(k)):
        raise UserError(f"successes must be a whole number from 0 to {m}, got {successes!r}")
    return int(k), m
