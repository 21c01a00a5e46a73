"""Exercises of notebook 03: scalar rewards."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sage_lite import theory
from sage_lite.advantages import get
from sage_lite.exercises import agree, exercise


def _log_mgf(rewards: torch.Tensor, tau: float) -> torch.Tensor:
    return torch.logsumexp(rewards / tau, -1) - math.log(rewards.shape[-1])


def _naive(rewards: torch.Tensor, tau: float) -> torch.Tensor:
    return (rewards / tau).exp().mean(-1).log()


def _log_of_sum(rewards: torch.Tensor, tau: float) -> torch.Tensor:
    return torch.logsumexp(rewards / tau, -1)


def _mean_of_log(rewards: torch.Tensor, tau: float) -> torch.Tensor:
    return (rewards / tau).mean(-1)


@exercise("03.1", "The objective of a sample", difficulty=1, minutes=5, solution=_log_mgf, wrong=[
    (_naive, "overflows"), (_log_of_sum, "subtract log M"), (_mean_of_log, "mean reward over tau")])
def _check_log_mgf(answer: Callable) -> None:
    graded = torch.tensor([[0.1, 0.2, 0.2, 0.9], [0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    agree(answer, _log_mgf, [(graded[0], 0.3), (graded, 1.0), (graded[0], 0.001)], names=["rewards", "tau"], mistakes={
        "exp(r / tau) overflows for a small tau: take the maximum out first, or use torch.logsumexp": _naive,
        "that is the log of the sum; for the log of the mean subtract log M": _log_of_sum,
        "that is the mean reward over tau: the exponential goes inside the mean, the log outside": _mean_of_log,
    })


def _smallest_tau(std: float, group_size: int, target: float) -> float:
    return std / math.sqrt(math.log(group_size / target))


def _forgot_root(std: float, group_size: int, target: float) -> float:
    return std / math.log(group_size / target)


def _forgot_share(std: float, group_size: int, target: float) -> float:
    return std / math.sqrt(math.log(target))


@exercise("03.2", "How small may tau be?", difficulty=1, minutes=5, solution=_smallest_tau, wrong=[
    (_forgot_root, "square root"), (_forgot_share, "share of the group"), (lambda s, m, t: s, "expected")])
def _check_smallest_tau(answer: Callable) -> None:
    cases = [(0.15, 8, 4.0), (0.3, 64, 8.0), (2.0, 16, 15.0)]
    agree(answer, _smallest_tau, cases, names=["std", "group_size", "target"], mistakes={
        "sigma / tau stands squared in the exponent: a square root is missing": _forgot_root,
        "exp(-sigma^2 / tau^2) is the share of the group, target / group_size, not 1 / target": _forgot_share,
    })


def _edge(gap: float, group_size: int) -> float:
    growth = math.expm1(gap)
    return sum(growth / (k * growth + group_size) for k in range(1, group_size))


def _loop_work(x: float, y: float, group_size: int) -> float:
    return _edge(x, group_size) + _edge(y, group_size) - _edge(x + y, group_size)


def _no_return(x: float, y: float, group_size: int) -> float:
    return _edge(x, group_size) + _edge(y, group_size)


def _adds(x: float, y: float, group_size: int) -> float:
    return _no_return(x, y, group_size) + _edge(x + y, group_size)


def _infinite_group(x: float, y: float, group_size: int) -> float:
    return 0.0


@exercise("03.3", "Work around the triangle", difficulty=2, minutes=10, solution=_loop_work, wrong=[
    (_no_return, "way back"), (_adds, "minus"), (_infinite_group, "infinitely large")])
def _check_loop_work(answer: Callable) -> None:
    ln2 = math.log(2.0)
    cases = [(ln2, ln2, 2), (ln2, ln2, 8), (0.5, 2.0, 5), (1.0, 1e-9, 4)]
    agree(answer, _loop_work, cases, names=["x", "y", "group_size"], mistakes={
        "the way back from level 3 to level 1 is missing": _no_return,
        "the way back is walked downhill: its work counts with a minus": _adds,
        "that holds for an infinitely large group only": _infinite_group,
    })


def _worst_factor(weight: float, delta: float, tau: float) -> float:
    bound = math.exp(2.0 * delta / tau)
    return bound / (1.0 + weight * (bound - 1.0))


def _bound(weight: float, delta: float, tau: float) -> float:
    return math.exp(2.0 * delta / tau)


def _own_noise_only(weight: float, delta: float, tau: float) -> float:
    up = math.exp(delta / tau)
    return up / (1.0 + weight * (up - 1.0))


@exercise("03.4", "The worst that noise can do", difficulty=2, minutes=10, solution=_worst_factor, wrong=[
    (_bound, "the bound"), (_own_noise_only, "others"), (lambda w, d, t: math.exp(d / t), "expected")])
def _check_worst_factor(answer: Callable) -> None:
    cases = [(0.125, 0.1, 0.3), (0.5, 0.3, 0.3), (0.9, 0.05, 0.1), (0.01, 0.02, 0.5)]
    agree(answer, _worst_factor, cases, names=["weight", "delta", "tau"], mistakes={
        "that is the bound, reached only by a weight near 0: the denominator grows with your rollout, too": _bound,
        "the others may be pushed down as well: give them -delta": _own_noise_only,
    })


def _matched_scale(tau: float, pass_rate: float, group_size: int) -> float:
    reference, this = (theory.mean_abs_advantage(get("sage", tau=t), pass_rate, group_size) for t in (0.1, tau))
    return reference / this


def _upside_down(tau: float, pass_rate: float, group_size: int) -> float:
    return 1.0 / _matched_scale(tau, pass_rate, group_size)


def _linear(tau: float, pass_rate: float, group_size: int) -> float:
    return tau / 0.1


@exercise("03.5", "A fair comparison of two temperatures", difficulty=3, minutes=15, solution=_matched_scale, wrong=[
    (_upside_down, "upside down"), (_linear, "large tau"), (lambda tau, p, m: 1.0, "expected")])
def _check_matched_scale(answer: Callable) -> None:
    cases = [(1.0, 0.5, 8), (0.5, 0.1, 4), (10.0, 0.9, 16), (0.05, 0.3, 8)]
    agree(answer, _matched_scale, cases, names=["tau", "pass_rate", "group_size"], mistakes={
        "upside down: the advantages at this tau are multiplied by your number": _upside_down,
        "tau / 0.1 would be right if both were large tau; at 0.1 the softmax is far from linear": _linear,
    })
