"""The three losses of the classifier experiment agree in expectation, exactly, and differ in variance."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from sage_lite import advantages, theory, vision
from sage_lite.errors import UserError

LOGITS = torch.tensor([[0.3, -0.8, 1.1]], dtype=torch.float64)
LABEL = torch.tensor([1])
M = 4
ALL = [("sage", {"tau": 0.2}), ("grpo", {"eps": 0.0}), ("grpo", {"ddof": 1}), ("dr_grpo", {}), ("rloo", {}),
       ("maxrl", {}), ("focal_grpo", {}), ("reinforce", {}), ("reinforce", {"baseline": 0.3}), ("sign", {})]
methods = pytest.mark.parametrize(("name", "parameters"), ALL, ids=lambda v: "-".join(map(str, v)) if v else "")


def gradient(loss, logits=LOGITS):
    """Gradient of loss(logits) in the logits."""
    z = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(z), z)[0]


def all_samples():
    """Every group of M labels, [C^M, M], and its probability."""
    groups = torch.tensor(list(itertools.product(range(LOGITS.shape[1]), repeat=M)))
    return groups, LOGITS[0].softmax(-1)[groups].prod(-1)


def literal_gradients(advantage):
    """Gradient of the literal loss for each group, [C^M, C]."""
    return torch.stack([gradient(lambda z: vision.given_samples(z, LABEL, group[None], advantage))[0]
                        for group in all_samples()[0]])


def conditional_gradients(advantage):
    """Gradient of the conditional loss for K = 0..M, [M + 1, C]."""
    return torch.stack([gradient(lambda z: vision.given_successes(vision.log_odds(z, LABEL), torch.tensor([float(k)]),
                                                                  M, advantage))[0] for k in range(M + 1)])


@methods
def test_conditional_loss_is_the_literal_one_averaged_given_the_successes(name, parameters):
    advantage = advantages.get(name, **parameters)
    groups, chance = all_samples()
    literal, conditional = literal_gradients(advantage), conditional_gradients(advantage)
    for k in range(M + 1):
        here = (groups == LABEL).sum(-1) == k
        mean = (chance[here, None] * literal[here]).sum(0) / chance[here].sum()
        assert torch.allclose(mean, conditional[k], rtol=1e-9, atol=1e-12), f"{k} successes"


@methods
def test_all_three_have_the_gradient_that_theory_says(name, parameters):
    """Enumeration of every group, of every K, no sampling, and -w(p) grad p by autograd of p itself: one gradient."""
    advantage = advantages.get(name, **parameters)
    p = float(LOGITS[0].softmax(-1)[1])
    grad_p = gradient(lambda z: z.softmax(-1)[0, 1])[0]
    expected = -theory.prompt_weight(advantage, p, M) * grad_p
    pmf = torch.tensor([math.comb(M, k) * p**k * (1 - p) ** (M - k) for k in range(M + 1)], dtype=torch.float64)
    for found in (all_samples()[1] @ literal_gradients(advantage), pmf @ conditional_gradients(advantage),
                  gradient(lambda z: vision.expected_label_loss(z, LABEL, M, advantage))[0]):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@methods
def test_conditional_loss_has_less_variance(name, parameters):
    advantage = advantages.get(name, **parameters)
    groups, chance = all_samples()
    literal, conditional = literal_gradients(advantage), conditional_gradients(advantage)
    conditional = conditional[(groups == LABEL).sum(-1)]
    mean = chance @ literal

    def variance(gradients):
        return float(chance @ (gradients - mean).square().sum(-1))

    if name == "reinforce" and not parameters:  # wrong samples have A = 0: there is nothing to average
        assert variance(conditional) == pytest.approx(variance(literal), rel=1e-9)
    else:
        assert variance(conditional) < 0.99 * variance(literal)


def test_zero_sum_case_is_successes_times_advantage_over_one_minus_p():
    """The formula K success[K] / (M (1 - p)) grad log p, by autograd of log p."""
    advantage = advantages.get("sage", tau=0.2)
    success, p = theory.binary_table(advantage, M).success, float(LOGITS[0].softmax(-1)[1])
    grad_log_p = gradient(lambda z: z.log_softmax(-1)[0, 1])[0]
    for k, found in enumerate(conditional_gradients(advantage)):
        assert torch.allclose(found, -k * success[k] / (M * (1 - p)) * grad_log_p, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [vision.sampled_label_loss, vision.conditional_label_loss])
def test_sampling_losses_have_that_mean_to_their_standard_error(loss):
    """The functions as they are called, in float32: 20,000 images at once, seeded."""
    n, generator = 20_000, torch.Generator().manual_seed(0)
    z = LOGITS.float().repeat(n, 1).requires_grad_()
    gradients = n * torch.autograd.grad(loss(z, LABEL.repeat(n), 8, "maxrl", generator=generator), z)[0].double()
    expected = gradient(lambda z: vision.expected_label_loss(z, LABEL, 8, "maxrl"))[0]
    error = gradients.std(0) / n**0.5
    assert ((gradients.mean(0) - expected).abs() < 4 * error).all() and (error < 0.01).all()


def test_weight_one_over_p_is_cross_entropy():
    """A table whose gain is that of MaxRL tends to log p as M grows: p w(p) = 1 - (1 - p)^(M - 1)."""
    cross_entropy = gradient(lambda z: torch.nn.functional.cross_entropy(z, LABEL))
    found = gradient(lambda z: vision.expected_label_loss(z, LABEL, 400, "maxrl"))
    assert torch.allclose(found, cross_entropy, rtol=1e-9)


@pytest.mark.parametrize(("name", "parameters", "speed"), [
    ("reinforce", {}, 0.5), ("rloo", {}, 0.5), ("sign", {}, 1.0), ("grpo", {"eps": 0.0}, 1.85566 / 2),
    ("sage", {"tau": 0.1}, 1.98413 / 2), ("sage", {"tau": 1.0}, 0.82584 / 2), ("maxrl", {}, 1.98438 / 2)])
def test_relative_speed(name, parameters, speed):
    advantage = advantages.get(name, **parameters)
    assert vision.relative_speed(advantage, 0.5, 8) == pytest.approx(speed, abs=3e-6)
    assert vision.relative_speed(advantage, [0.0, 0.5], 8) == pytest.approx([0.0, speed], abs=3e-6)


# p = 1/1000 to two ends that float32 cannot tell from 0 and 1
EXTREME = torch.tensor([[-90.0, 0.0, 0.0], [90.0, 0.0, 0.0], [1e30, 0.0, 0.0], [-1e30, 0.0, 0.0], [0.0, 0.0, 0.0],
                        [17.0, 0.0, 0.0]])


@pytest.mark.parametrize("loss", vision.LOSSES.values(), ids=vision.LOSSES)
@methods
def test_finite_at_both_ends(loss, name, parameters):
    labels = torch.zeros(len(EXTREME), dtype=torch.long)
    advantage = advantages.get(name, **parameters)
    found = gradient(lambda z: loss(z, labels, 16, advantage, generator=torch.Generator().manual_seed(0)), EXTREME)
    assert found.isfinite().all() and found.dtype is torch.float32


def test_right_at_a_pass_rate_that_rounds_to_one():
    """1 - p = 2e-20, K = M - 1: float32's p / (1 - p) would be infinite; the gradient is (M - 1) success / M."""
    z = torch.tensor([[45.0, 0.0, 0.0]])
    label, k, m = torch.tensor([0]), torch.tensor([7.0]), 8
    found = gradient(lambda z: vision.given_successes(vision.log_odds(z, label), k, m, "maxrl"), z)
    success = 8 / 7 - 1
    assert torch.allclose(found, torch.tensor([[-7 * success / 8, 3.5 * success / 8, 3.5 * success / 8]]))
    naive = k * success / (m * (1 - z.softmax(-1)[:, 0])) * gradient(lambda z: z.log_softmax(-1)[:, 0].sum(), z)
    assert not naive.isfinite().all()


@pytest.mark.parametrize("odds", [-100.0, -7.0, -1.0, 0.0, 0.7, 5.0, 100.0])
def test_successes_are_binomial(odds):
    p, m, n = 1 / (1 + math.exp(-odds)), 16, 20_000
    k = vision.draw_successes(torch.full((n,), odds), m, generator=torch.Generator().manual_seed(1))
    assert (k == k.round()).all() and k.min() >= 0 and k.max() <= m
    error = math.sqrt(m * p * (1 - p) / n)
    assert abs(k.mean().item() - m * p) <= 4 * error
    if 0.01 < p < 0.99:
        assert k.var().item() == pytest.approx(m * p * (1 - p), rel=0.06)


def test_log_odds_and_exact_pass_at_k():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]], dtype=torch.float64)
    p = logits.softmax(-1)[0]
    for label in range(4):
        odds = vision.log_odds(logits, torch.tensor([label]))
        assert odds.item() == pytest.approx(math.log(p[label] / (1 - p[label])))
        for k in (1, 2, 128):
            assert vision.pass_at(odds, k).item() == pytest.approx(1 - (1 - p[label].item()) ** k)
    tiny = vision.pass_at(torch.tensor([-40.0]), 128)  # 1 - (1 - p)^k in float32 would be 0
    assert tiny.item() == pytest.approx(128 * math.exp(-40), rel=1e-4)


@pytest.mark.parametrize(("own", "message"), [
    (lambda r: r / r.mean(-1, keepdim=True), r"nan for the group of rewards \[0, 0"),
    (lambda r: r.mean(-1, keepdim=True), "shape"), (lambda r: r.mean(), "shape"),
])
def test_a_readers_function_is_looked_at(own, message):
    with pytest.raises(UserError, match=message):
        vision.given_samples(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([[0, 1], [2, 2]]), own)


def test_mixed_precision_logits_are_taken_as_float32():
    z = LOGITS.bfloat16().requires_grad_()
    vision.conditional_label_loss(z, LABEL, 16, "sage").backward()
    assert z.grad.dtype is torch.bfloat16
    assert vision.log_odds(z, LABEL).dtype is torch.float32


def test_a_ready_table_serves_as_advantage_and_must_fit():
    table = theory.binary_table("sage", 16)
    a, b = (vision.conditional_label_loss(LOGITS, LABEL, 16, advantage, generator=torch.Generator().manual_seed(3))
            for advantage in ("sage", table))
    assert a == b
    with pytest.raises(UserError, match="group_size 16"):
        vision.conditional_label_loss(LOGITS, LABEL, 8, table)


@pytest.mark.parametrize("loss", vision.LOSSES.values(), ids=vision.LOSSES)
@pytest.mark.parametrize(("logits", "labels", "message"), [
    (torch.zeros(2, 1), torch.zeros(2, dtype=torch.long), "at least two classes"),
    (torch.zeros(3), torch.zeros(3, dtype=torch.long), "logits must be"),
    (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), r"\(2, 3\) and \(3,\)"),
    (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "logits must be"),
    (torch.zeros(2, 3), torch.tensor([0, 3]), "labels must lie in 0..2 .* got 3"),
    (torch.zeros(2, 3), torch.tensor([-1, 0]), "got -1"),
    (torch.tensor([[0.0, float("nan")]]), torch.tensor([0]), "lower the learning rate"),
])
def test_what_does_not_fit_is_said(loss, logits, labels, message):
    with pytest.raises(UserError, match=message):
        loss(logits, labels, 4, "sage")


@pytest.mark.parametrize("rollouts", [0, -1, 1.5, "8"])
def test_rollouts_must_be_a_count(rollouts):
    for loss in vision.LOSSES.values():
        with pytest.raises(UserError, match="group_size must be a whole number"):
            loss(LOGITS, LABEL, rollouts, "sage")


def test_a_group_of_one_teaches_reinforce_only():
    for name, moves in (("reinforce", True), ("sage", False), ("grpo", False)):
        found = gradient(lambda z: vision.expected_label_loss(z, LABEL, 1, name))
        assert bool((found != 0).any()) == moves


def test_mean_over_images():
    z = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1])
    each = [vision.expected_label_loss(z[i:i + 1], labels[i:i + 1], 8, "sage").item() for i in range(5)]
    assert vision.expected_label_loss(z, labels, 8, "sage").item() == pytest.approx(np.mean(each))
