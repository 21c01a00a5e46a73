"""Exercises of notebook 07: enough rollouts, the draw given its successes, the stretched clock, a temperature."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sage_lite import theory, vision
from sage_lite.exercises import agree, exercise, expect

# -- 07.1 ----------------------------------------------------------------------------------------------------------


def _enough(pass_rate: float, chance: float) -> int:
    return math.ceil(math.log(1 - chance) / math.log(1 - pass_rate))


def _smallest(pass_rate: float, chance: float) -> int:
    """The same, by trying: no logarithm to round."""
    rollouts = 1
    while 1 - (1 - pass_rate) ** rollouts < chance:
        rollouts += 1
    return rollouts


_ENOUGH_MISTAKES = {
    "M p is the mean number of successes, not the chance of one": lambda p, c: math.ceil(c / p),
    "round up: the smaller number of rollouts does not reach the chance":
        lambda p, c: math.floor(math.log(1 - c) / math.log(1 - p)),
    "that is for a group that holds no success with this chance":
        lambda p, c: math.ceil(math.log(c) / math.log(1 - p)),
}


@exercise("07.1", "How many rollouts until one is right?", difficulty=1, minutes=5, solution=_enough,
          wrong=[(wrong, message) for message, wrong in _ENOUGH_MISTAKES.items()])
def _check_enough(answer) -> None:
    cases = [(0.001, 0.9), (0.01, 0.9), (0.1, 0.6), (0.3, 0.99), (0.002, 0.2)]
    agree(answer, _smallest, cases, names=["pass_rate", "chance"], mistakes=_ENOUGH_MISTAKES, atol=1e-9, rtol=0)


# -- 07.2 ----------------------------------------------------------------------------------------------------------


def _given(k: Tensor, p: Tensor, success: Tensor, failure: Tensor) -> Tensor:
    m = len(success) - 1
    return (k * success[k] - (m - k) * failure[k] * p / (1 - p)) / m


_GIVEN_MISTAKES = {
    "the wrong samples push, too: their mean gradient is -p / (1 - p) grad log p":
        lambda k, p, s, f: k * s[k] / (len(s) - 1),
    "the loss is a mean over the M samples": lambda k, p, s, f: (len(s) - 1) * _given(k, p, s, f),
    "a wrong sample's mean gradient points away from the label: mind its sign":
        lambda k, p, s, f: (k * s[k] + (len(s) - 1 - k) * f[k] * p / (1 - p)) / (len(s) - 1),
    "that is the gradient of the loss; the update goes the other way": lambda k, p, s, f: -_given(k, p, s, f),
    "this holds for advantages that sum to zero; here they need not":
        lambda k, p, s, f: k * s[k] / ((len(s) - 1) * (1 - p)),
}


@exercise("07.2", "Average the wrong samples out", difficulty=2, minutes=15, solution=_given,
          wrong=[(wrong, message) for message, wrong in _GIVEN_MISTAKES.items()])
def _check_given(answer) -> None:
    tables = [theory.binary_table(name, m) for name, m in (("sign", 8), ("sage", 8), ("sign", 16))]
    k, p = torch.tensor([0, 1, 5, 8]), torch.tensor([0.1, 0.3, 0.6, 0.8], dtype=torch.float64)
    cases = [(k, p, *map(torch.from_numpy, table)) for table in tables]

    def reference(k, p, success, failure):
        """Autograd of the library's loss in the log-odds; grad log p = (1 - p) grad log-odds."""
        odds = torch.logit(p).requires_grad_()
        table = theory.BinaryTable(success.numpy(), failure.numpy())
        loss = vision.given_successes(odds, k.double(), table.group_size, table) * len(k)
        return -torch.autograd.grad(loss, odds)[0] / (1 - p)

    agree(answer, reference, cases, names=["k", "p", "success", "failure"], mistakes=_GIVEN_MISTAKES)


# -- 07.3 ----------------------------------------------------------------------------------------------------------


def _stretched(pass_rates: np.ndarray, weights: np.ndarray) -> float:
    return float((1 / (pass_rates * weights)).sum())


_STRETCH_MISTAKES = {
    "a slow method takes longer: divide by its speed": lambda p, w: (p * w).sum(),
    "the speed beside cross-entropy is p w(p), not w(p)": lambda p, w: (1 / w).sum(),
    "the speed changes on the way: add up the steps, do not stretch them all by the first":
        lambda p, w: len(p) / (p * w)[0],
    "the speed changes on the way: add up the steps, do not stretch them all by the mean speed":
        lambda p, w: len(p) / (p * w).mean(),
}


@exercise("07.3", "Stretch the clock", difficulty=2, minutes=10, solution=_stretched,
          wrong=[(wrong, message) for message, wrong in _STRETCH_MISTAKES.items()])
def _check_stretched(answer) -> None:
    p = np.array([0.001, 0.001, 0.002, 0.005, 0.01, 0.1])
    cases = [(p, theory.prompt_weight(name, p, 64)) for name in ("reinforce", "maxrl", "grpo")]
    agree(answer, _stretched, cases, names=["pass_rates", "weights"], mistakes=_STRETCH_MISTAKES)


# -- 07.4 ----------------------------------------------------------------------------------------------------------


def _tau_for(pass_rate: float, speed: float) -> float:
    return 1 / math.log(1 + speed / (pass_rate * (1 - speed)))


_TAU_MISTAKES = {
    "c = exp(1 / tau), so tau is one over the logarithm": lambda p, s: math.log(1 + s / (p * (1 - s))),
    "solve for c, not for c - 1": lambda p, s: 1 / math.log(s / (p * (1 - s))),
    "that is the temperature at which w(p), not p w(p), is the speed":
        lambda p, s: 1 / math.log(1 + s / (1 - s * p)),
}


@exercise("07.4", "A temperature for so many classes", difficulty=3, minutes=15, solution=_tau_for,
          wrong=[(wrong, message) for message, wrong in _TAU_MISTAKES.items()])
def _check_tau(answer) -> None:
    cases = [(0.001, 0.5), (0.01, 0.5), (0.1, 0.25), (0.001, 0.9)]
    agree(answer, _tau_for, cases, names=["pass_rate", "speed"], mistakes=_TAU_MISTAKES)
    for pass_rate, speed in cases:  # and it does what it is for: a large group at that temperature has that speed
        c = math.exp(1 / answer(pass_rate, speed))
        expect(pass_rate * (c - 1) / (1 - pass_rate + pass_rate * c), speed, "the speed of a large group")
