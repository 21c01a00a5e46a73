"""Exercises of notebook 01: the table of an advantage, its weight, and what a weight asks of an advantage."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import binom

from sage_lite import advantages, theory
from sage_lite.errors import UserError
from sage_lite.exercises import NotYet, agree, exercise, expect

# --- 01.1 -----------------------------------------------------------------------------------------------------------


def _two_numbers(k, group_size, tau):
    c = math.exp(1 / tau)
    total = k * c + (group_size - k)
    return group_size * c / total - 1, group_size / total - 1


def _softmax_only(k, group_size, tau):
    success, failure = _two_numbers(k, group_size, tau)
    return (success + 1) / group_size, (failure + 1) / group_size


def _no_minus_one(k, group_size, tau):
    success, failure = _two_numbers(k, group_size, tau)
    return success + 1, failure + 1


def _times_tau(k, group_size, tau):
    return _two_numbers(k, group_size, 1 / tau)


def _swapped(k, group_size, tau):
    return _two_numbers(k, group_size, tau)[::-1]


@exercise(
    "01.1", "SAGE's two numbers", difficulty=1, minutes=10, solution=_two_numbers,
    wrong=[(_softmax_only, "factor M"), (_no_minus_one, "sum to M"), (_times_tau, "reward divided by tau"),
           (_swapped, "order is success, failure"), (lambda k, m, tau: m / k - 1, "(success, failure)")],
)  # fmt: skip
def _check_two_numbers(answer):
    def measured(k, group_size, tau):
        table = theory.binary_table(advantages.get("sage", tau=tau), group_size)
        return table.success[k], table.failure[k]

    cases = [(2, 8, 0.5), (1, 8, 0.3), (7, 8, 0.3), (3, 4, 1.0), (5, 16, 0.1)]
    if np.ndim(answer(*cases[0])) != 1:
        raise NotYet("return two numbers: (success, failure)")
    agree(answer, measured, cases, names=("k", "group_size", "tau"), mistakes={
        "these are the softmax weights: the factor M and the - 1 are missing": _softmax_only,
        "these sum to M, an advantage sums to zero: subtract 1": _no_minus_one,
        "the exponent is the reward divided by tau, not times tau": _times_tau,
        "the order is success, failure": _swapped,
    })  # fmt: skip


# --- 01.2 -----------------------------------------------------------------------------------------------------------


def _weight(success, failure, p):
    m = len(success) - 1
    k = np.arange(m + 1)
    inside = k / m * success / p - (m - k) / m * failure / (1 - p)
    return binom.pmf(k, m, p) @ inside


def _failures_added(success, failure, p):
    return _weight(success, -failure, p)


def _without_shares(success, failure, p):
    m = len(success) - 1
    return binom.pmf(np.arange(m + 1), m, p) @ (success / p - failure / (1 - p))


def _without_scores(success, failure, p):
    m = len(success) - 1
    k = np.arange(m + 1)
    return binom.pmf(k, m, p) @ (k / m * success - (m - k) / m * failure)


@exercise(
    "01.2", "From the table to the weight", difficulty=2, minutes=15, solution=_weight,
    wrong=[(_failures_added, "minus sign"), (_without_shares, "k/M and (M-k)/M"), (_without_scores, "1/p and 1/(1-p)"),
           (lambda success, failure, p: success, "expected shape")],
)  # fmt: skip
def _check_weight(answer):
    def measured(success, failure, p):
        return theory.prompt_weight(theory.BinaryTable(success, failure), p, len(success) - 1)

    tables = [theory.binary_table(name, m) for name, m in (("sage", 4), ("grpo", 5), ("sign", 8))]
    cases = [(t.success, t.failure, p) for t, p in zip(tables, (0.3, 0.9, 0.5))]
    agree(answer, measured, cases, names=("success", "failure", "p"), mistakes={
        "a failure pushes p down: its term has a minus sign": _failures_added,
        "only a share of the group succeeds: weigh the terms with k/M and (M-k)/M": _without_shares,
        "the slopes of log p and log(1-p) are missing: 1/p and 1/(1-p)": _without_scores,
    })  # fmt: skip


# --- 01.3 -----------------------------------------------------------------------------------------------------------


def _warmest_tau(group_size, floor):
    c = (group_size / (1 - floor) - 1) / (group_size - 1)
    return 1 / math.log(c)


def _off_by_one(group_size, floor):
    return 1 / math.log((group_size / (1 - floor) - 1) / group_size)


def _c_itself(group_size, floor):
    return (group_size / (1 - floor) - 1) / (group_size - 1)


@exercise(
    "01.3", "How warm may tau be?", difficulty=2, minutes=10, solution=_warmest_tau,
    wrong=[(_c_itself, "this is c"), (lambda m, floor: 1 / _warmest_tau(m, floor), "this is 1/tau"),
           (_off_by_one, "w(1) is"), (lambda m, floor: 0.1, "w(1) is")],
)  # fmt: skip
def _check_warmest_tau(answer):
    cases = [(8, 0.5), (16, 0.9), (4, 0.95), (64, 0.99)]
    for message, mistake in {"this is c, not tau": _c_itself, "this is 1/tau": lambda *c: 1 / _warmest_tau(*c)}.items():
        if all(np.allclose(answer(*case), mistake(*case), rtol=1e-4) for case in cases):
            raise NotYet(message)
    for group_size, floor in cases:
        tau = answer(group_size, floor)
        end = theory.prompt_weight(advantages.get("sage", tau=tau), 1.0, group_size)
        expect(end, floor, f"with your tau = {tau:.4g} for group_size = {group_size}, w(1) is to be the floor",
               rtol=1e-5, atol=0)  # fmt: skip


# --- 01.4 -----------------------------------------------------------------------------------------------------------


def _scale_matched(lr, tau, group_size):
    reference, other = (theory.objective(advantages.get("sage", tau=t), 1.0, group_size) for t in (0.1, tau))
    return lr * reference / other


def _upside_down(lr, tau, group_size):
    return lr * lr / _scale_matched(lr, tau, group_size)


def _by_the_middle(lr, tau, group_size):
    reference, other = (theory.prompt_weight(advantages.get("sage", tau=t), 0.5, group_size) for t in (0.1, tau))
    return lr * reference / other


def _matched_by_quadrature(lr, tau, group_size):
    x, share = np.polynomial.legendre.leggauss(group_size)  # exact: w is a polynomial of degree M - 1
    reference, other = (share @ theory.prompt_weight(advantages.get("sage", tau=t), (x + 1) / 2, group_size)
                        for t in (0.1, tau))  # fmt: skip
    return lr * reference / other


@exercise(
    "01.4", "A fair comparison of two tau", difficulty=2, minutes=10, solution=_scale_matched,
    wrong=[(_upside_down, "upside down"), (_by_the_middle, "whole curve"),
           (lambda lr, tau, m: lr * tau / 0.1, "only for large tau")],
)  # fmt: skip
def _check_scale_matched(answer):
    cases = [(1.0, 1.0, 8), (1e-3, 0.3, 16), (0.5, 10.0, 4)]
    agree(answer, _matched_by_quadrature, cases, names=("lr", "tau", "group_size"), rtol=1e-2, atol=0, mistakes={
        "the ratio is upside down: a smaller mean weight needs a larger step": _upside_down,
        "this matches the weight at p = 1/2; take the mean over the whole curve": _by_the_middle,
        "w shrinks like 1/tau only for large tau": lambda lr, tau, m: lr * tau / 0.1,
    })  # fmt: skip


# --- 01.5 -----------------------------------------------------------------------------------------------------------


def _pass_at_two(rewards):
    others_failed = (1 - rewards).sum(-1, keepdim=True) - (1 - rewards)
    return 2 * rewards * others_failed / (rewards.shape[-1] - 1)


def _counts_itself(rewards):
    return 2 * rewards * (1 - rewards).mean(-1, keepdim=True)


@exercise(
    "01.5", "An advantage for pass@2", difficulty=3, minutes=25, solution=_pass_at_two,
    wrong=[(_counts_itself, "w(0) is"), (lambda r: r - r.mean(-1, keepdim=True), "w(0) is"),
           (lambda r: 1.0 * (r.sum(-1, keepdim=True) > 0).expand_as(r), "w(0) is"),
           (lambda r: r - r.mean(), "reduce over the last axis")],
)  # fmt: skip
def _check_pass_at_two(answer):
    for group_size in (4, 8):
        for p in (0.0, 0.25, 0.5, 1.0):
            try:
                weight = theory.prompt_weight(answer, p, group_size)
            except UserError as error:
                raise NotYet(str(error)) from error
            expect(weight, 2 * (1 - p), f"for group_size = {group_size}, w({p:g}) is to be 2(1 - p)")
