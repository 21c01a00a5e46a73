"""Rewards of several levels: exact tables, work along paths, and the limits they tend to."""
from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_lite import advantages, categorical, closed_forms, scalar, theory
from sage_lite.errors import UserError

ALL = ["sage", "grpo", "dr_grpo", "rloo", "maxrl", "focal_grpo", "reinforce", "sign"]
TRIANGLE = np.eye(3)[[0, 1, 2, 0]]
LN2 = math.log(2.0)
every = pytest.mark.parametrize("name", ALL)


@every
@pytest.mark.parametrize(("rewards", "m"), [
    ([0.0, 0.4, 1.0], 5), ([0.2, 0.2, 0.9, 0.5], 3), ([0.3, 1.0], 6), ([0.7], 4)])
def test_update_is_the_exact_loss_gradient(name, rewards, m):
    policy = categorical.Categorical(np.linspace(0.5, -0.7, len(rewards)), rewards)
    update = scalar.expected_update(scalar.level_table(name, rewards, m), policy.probs.detach())
    np.testing.assert_allclose(update, -policy.expected_gradient(name, m), atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=4), st.integers(1, 6))
def test_rows_of_a_table_are_a_distribution(rewards, m):
    table = scalar.level_table("sage", rewards, m)
    assert table.group_size == m
    assert (table.counts.sum(1) == m - 1).all() and len({tuple(c) for c in table.counts}) == len(table.counts)
    constant = table._replace(advantage=np.ones_like(table.advantage))
    pi = np.full(len(rewards), 1 / len(rewards))
    np.testing.assert_allclose(scalar.level_values(constant, pi), 1.0, rtol=1e-12)


def test_one_row_by_hand():
    """M = 3, e^(r/tau) = 1, 2, 4: beside one 1 and one 4, a 2 gets 3 * 2/7 - 1."""
    table = scalar.level_table(advantages.get("sage", tau=1.0), [0.0, LN2, 2 * LN2], 3)
    row = table.counts.tolist().index([1.0, 0.0, 1.0])
    assert table.advantage[row, 1] == pytest.approx(3 * 2 / 7 - 1) and math.exp(table.log_ways[row]) == pytest.approx(2)


@every
@pytest.mark.parametrize("m", [1, 2, 7])
def test_two_levels_are_the_pass_rate_theory(name, m):
    """Work from p = 0 to p = 1 is h, on the way, too; and it returns."""
    p = np.array([0.0, 0.3, 1.0, 0.0])
    work = scalar.work(scalar.level_table(name, [0.0, 1.0], m), np.stack([1 - p, p], -1))
    np.testing.assert_allclose(work, theory.objective(name, p, m), atol=1e-12)


@pytest.mark.parametrize("m", [2, 3, 4, 9])
def test_work_of_sage_around_the_triangle_is_the_fraction(m):
    def edge(ratio):
        return sum(1 / (k + Fraction(m, ratio - 1)) for k in range(1, m))

    table = scalar.level_table(advantages.get("sage", tau=0.3), 0.3 * LN2 * np.arange(3.0), m)
    assert scalar.work(table, TRIANGLE)[-1] == pytest.approx(float(2 * edge(2) - edge(4)), abs=1e-14)
    assert m > 2 or 2 * edge(2) - edge(4) == Fraction(1, 15)


@pytest.mark.parametrize(("name", "params", "work"), [
    ("grpo", {"eps": 0.0}, sum(1 / math.sqrt(k * (5 - k)) for k in range(1, 5))),
    ("dr_grpo", {}, 0.0), ("rloo", {}, 0.0), ("reinforce", {"baseline": 0.3}, 0.0)])
def test_work_of_others_around_the_triangle(name, params, work):
    table = scalar.level_table(advantages.get(name, **params), [0.1, 0.3, 1.0], 5)
    assert scalar.work(table, TRIANGLE)[-1] == pytest.approx(work, abs=1e-12)


def test_work_around_a_small_loop_is_the_cross_partials_times_its_area():
    rewards = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64)
    left, right = categorical.cross_partials(categorical.pair_advantages("sage", rewards).tolist())
    path = np.array([[0.3, 0.3, 0.4], [0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.3, 0.3, 0.4]])
    work = scalar.work(scalar.level_table("sage", rewards, 2), path)[-1]
    assert work == pytest.approx((right - left) * 0.02, rel=1e-9)


def test_large_groups_tend_to_the_log_mgf():
    policy, tau = categorical.Categorical([0.2, 0.5, -0.7], [0.0, 0.4, 1.0]), 0.3
    log_mgf = torch.logsumexp(policy.rewards / tau + policy.logits.log_softmax(-1), -1)
    limit = torch.autograd.grad(log_mgf, policy.logits)[0]
    update = [scalar.expected_update(scalar.level_table(advantages.get("sage", tau=tau), policy.rewards, m),
                                     policy.probs.detach()) for m in (32, 64)]
    near, far = (np.linalg.norm(u - limit.numpy()) for u in update[::-1])
    assert near / far == pytest.approx(0.5, abs=0.05)


def test_gaussian_log_mgf_by_quadrature():
    x, weight = np.polynomial.hermite_e.hermegauss(60)
    mean = weight @ np.exp((0.4 + 0.2 * x) / 0.3) / weight.sum()
    assert scalar.gaussian_log_mgf(0.4, 0.2, 0.3) == pytest.approx(math.log(mean), rel=1e-12)


@pytest.mark.parametrize("k", range(9))
def test_sample_size_of_binary_rewards(k):
    rewards = torch.tensor([1.0] * k + [0.0] * (8 - k), dtype=torch.float64)
    size = float(scalar.softmax_sample_size(rewards, 0.3))
    assert size == pytest.approx(closed_forms.effective_sample_size(k, 8, 0.3))


def test_sample_size_has_the_shape_of_the_groups():
    assert scalar.softmax_sample_size(torch.rand(2, 3, 5), 0.1).shape == (2, 3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=8, unique=True), st.floats(0.05, 0.95))
def test_match_tau_hits_its_target(rewards, share):
    r = torch.tensor(rewards, dtype=torch.float64)
    if sorted(rewards)[-1] - sorted(rewards)[-2] < 1e-3:
        return  # best and second best are one for any tau of interest
    target = 1 + share * (len(rewards) - 1)
    assert float(scalar.softmax_sample_size(r, scalar.match_tau(r, target))) == pytest.approx(target, rel=1e-6)


def test_match_tau_is_adaptive_tau_for_binary_rewards():
    rewards = torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    assert scalar.match_tau(rewards, 6.0) == pytest.approx(closed_forms.adaptive_tau(2, 8, 6), rel=1e-6)
    assert scalar.match_tau(rewards, 6.0) == pytest.approx(1 / math.log(3), rel=1e-6)


@pytest.mark.parametrize(("rewards", "target"), [
    ([1.0, 1.0, 0.0], 2.0), ([1.0, 0.0], 1.0), ([0.5, 0.5], 1.5), ([1.0, 0.0], 2.0)])
def test_match_tau_says_what_is_possible(rewards, target):
    with pytest.raises(UserError, match=f"got a target of {target:g}"):
        scalar.match_tau(torch.tensor(rewards), target)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: scalar.level_table("sage", [0.0, 0.5, 1.0], 2000), "too many to list"),
    (lambda: scalar.level_table("sage", [0.0, math.nan], 4), "must be finite"),
    (lambda: scalar.level_table("sagee", [0.0, 1.0], 4), "unknown advantage"),
    (lambda: scalar.level_values(scalar.level_table("sage", [0.0, 1.0], 4), [0.2, 0.3, 0.5]), "each of the 2 levels"),
    (lambda: scalar.level_values(scalar.level_table("sage", [0.0, 1.0], 4), [0.5, 0.6]), "sum to 1"),
    (lambda: scalar.gaussian_log_mgf(0.0, 1.0, 0.0), "tau"),
    (lambda: scalar.gaussian_log_mgf(0.0, -1.0, 1.0), "std"),
    (lambda: scalar.gaussian_log_mgf(math.nan, 1.0, 1.0), "mean.*nan"),
    (lambda: scalar.gaussian_log_mgf(0.0, 1.0, 1e-200), "tau 1e-200"),
    (lambda: scalar.gaussian_log_mgf(-1e300, 1.0, 1e-200), "tau 1e-200"),
    (lambda: scalar.level_table("sage", [0.0, None], 4), "None.*a finite number"),
    (lambda: scalar.level_table("sage", [[0.0, 1.0]], 4), r"\(1, 2\)"),
    (lambda: scalar.level_values(scalar.level_table("sage", [0.0, 1.0], 4), ["0.5", "0.5"]), "'0.5'"),
    (lambda: scalar.match_tau(torch.rand(2, 4), 2.0), r"one group.*\(2, 4\)"),
    (lambda: scalar.softmax_sample_size([1.0, None], 0.1), "None"),
])
def test_mistakes_are_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


@pytest.mark.parametrize(("own", "message"), [
    (lambda r: r - r.mean(), "other groups"),
    (lambda r: r - r[..., :1], "order"),
    (lambda r: r - r[..., r.shape[-1] // 2:r.shape[-1] // 2 + 1], "order"),
    (lambda r: r - r[..., :1] / 2 - r[..., -1:] / 2, "order"),
    (lambda r: r * torch.linspace(1, 2, r.shape[-1]), "order"),
    (lambda r: r / r.mean(-1, keepdim=True), r"nan.*\[0, 0"),
    (lambda r: r.sum(-1), "shape"), (lambda r: r.mean(-1, keepdim=True), "shape"), (lambda r: None, "None"),
])
@pytest.mark.parametrize(("rewards", "m"), [([0.0, 1.0], 4), ([0.0, 0.4, 1.0], 3), ([0.0, 0.2, 0.5, 1.0], 8)])
def test_what_is_no_group_advantage(own, message, rewards, m):
    with pytest.raises(UserError, match=message):
        scalar.level_table(own, rewards, m)


@pytest.mark.parametrize("own", [
    lambda r: r.numpy() - r.numpy().mean(-1, keepdims=True),
    lambda r: (r - r.mean(-1, keepdim=True)).requires_grad_(),
    lambda r: r.sub_(r.mean(-1, keepdim=True)),
    lambda r: r.float() - r.float().mean(-1, keepdim=True),
])
@pytest.mark.parametrize(("rewards", "m"), [([0.1, 0.3, 1.0], 4), ([0.1, 0.1], 5), ([0.3], 3), ([0.0, 0.7], 1)])
def test_a_readers_own_function(own, rewards, m):
    table, want = scalar.level_table(own, rewards, m), scalar.level_table("dr_grpo", rewards, m)
    np.testing.assert_allclose(table.advantage, want.advantage, atol=1e-6)


def test_probabilities_as_a_policy_makes_them():
    policy, table = categorical.Categorical([0.3, -0.2], [0.0, 1.0]), scalar.level_table("sage", [0.0, 1.0], 4)
    want = -policy.expected_gradient("sage", 4)
    np.testing.assert_allclose(scalar.expected_update(table, policy.probs), want, atol=1e-12)


def test_lists_are_groups_too():
    group = torch.tensor([1.0, 0.25, 0.0])
    torch.testing.assert_close(scalar.softmax_sample_size(group.tolist(), 0.3), scalar.softmax_sample_size(group, 0.3))
    assert scalar.match_tau(group.tolist(), 2.0) == scalar.match_tau(group, 2.0)


def test_compositions():
    assert sorted(map(tuple, scalar._compositions(3, 3))) == sorted(
        c for c in itertools.product(range(4), repeat=3) if sum(c) == 3)
