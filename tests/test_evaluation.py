from __future__ import annotations

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from small_models import small_policy

from sage_lite import advantages
from sage_lite.budget import BINS, GradientBudget, gradient_budget
from sage_lite.errors import UserError
from sage_lite.evaluation import bootstrap, evaluate, pass_at_k
from sage_lite.rollout import sample
from sage_lite.tasks import Task


def _task(score) -> Task:
    rows = [{"n": i} for i in range(6)]
    return Task(
        "numbers", rows, rows, {"short": lambda r: f"{r['n']} ="}, score, lambda row: None, max_new_tokens={"short": 6}
    )


@pytest.mark.parametrize("n, c", [(1, 0), (4, 0), (4, 1), (6, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_exact_where_factorials_overflow():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(1024, 1024, 1) == 1.0


@pytest.mark.parametrize("bad", [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_nonsense(bad):
    with pytest.raises(UserError, match=f"n={bad[0]}, c={bad[1]}, k={bad[2]}"):
        pass_at_k(*bad)


@pytest.mark.parametrize("bad", [(4.0, 1, 1), (4, 1.0, 1), (4, 1, 1.5), (np.array([4.0]), 1, 1), (4, np.ones(2), 1)])
def test_pass_at_k_needs_whole_numbers(bad):
    with pytest.raises(UserError, match="pass_at_k needs whole numbers"):
        pass_at_k(*bad)
    assert pass_at_k(np.int64(4), torch.tensor(1), 1) == 0.25


@pytest.mark.parametrize("n, c, k", [(10_001, 3, 1), (10_001, 3, 5_000), (20_000, 700, 3), (20_000, 40, 400),
                                     (15_000, 0, 7), (15_000, 14_990, 11), (15_000, 14_990, 10), (12_345, 678, 910)])
def test_pass_at_k_of_many_samples_is_the_exact_one(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_of_very_many_samples_is_fast():
    start = time.process_time()
    assert pass_at_k(10**6, 10, 500_000) == pytest.approx(1 - 0.5**10, rel=1e-4)
    assert pass_at_k(10**12, 10**6, 10**6) == pytest.approx(1 - math.exp(-1), rel=1e-5)
    assert pass_at_k(10**12, 5 * 10**11, 5 * 10**11) == 1.0
    assert time.process_time() - start < 1.0


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = [(i := bootstrap(rng.random(60) < 0.3, resamples=300, seed=s)).low <= 0.3 <= i.high for s in range(200)]
    assert 0.88 < np.mean(hits) < 0.99
    assert bootstrap([2.0, 2.0]).low == bootstrap([2.0, 2.0]).high == 2.0


@pytest.mark.parametrize("values, message", [
    ([], "at least one value"), (0.5, r"at least one value, got shape \(\)"),
    ([1, 0, np.nan, 1], "got nan at index 2: drop that problem"), ([[1, 2], [3, np.inf]], r"got inf at index \(1, 1\)"),
])  # fmt: skip
def test_bootstrap_refuses_what_has_no_interval(values, message):
    with pytest.raises(UserError, match=message):
        bootstrap(values)


def test_bootstrap_takes_any_array_of_numbers_and_refuses_the_rest():
    numbers = [0.0, 1.0, 0.5]
    wanted = bootstrap(numbers)
    for values in (torch.tensor(numbers, requires_grad=True), [torch.tensor(x) for x in numbers], np.float32(numbers)):
        assert bootstrap(values) == wanted
    assert bootstrap(torch.tensor(numbers, dtype=torch.bfloat16)) == wanted
    for junk in ("abc", ["1", "2"], [1.0, "x"], [[1.0], [1.0, 2.0]], [1j, 2.0], [{}]):
        with pytest.raises(UserError, match="bootstrap needs an array of numbers"):
            bootstrap(junk)


def test_bootstrap_of_one_problem_has_no_interval_and_needs_a_resample():
    one = bootstrap([1.0])
    assert one.value == 1.0 and np.isnan([one.low, one.high]).all() and one.bounds == [None, None]
    assert str(one) == "1.000 [nan, nan]" and bootstrap([2.0, 2.0]).bounds == [2.0, 2.0]
    for resamples in (0, -1, 2.5):
        with pytest.raises(UserError, match="resamples must be a whole number of at least 1"):
            bootstrap([1.0, 0.0], resamples=resamples)


def test_evaluate_counts_right_answers_and_leaves_failed_scores_out():
    calls = iter(range(10**6))

    def score(text, row):
        call = next(calls)
        return None if call % 8 == 0 else float(call % 8 == 1)

    found = evaluate(small_policy(), _task(score), samples=8, prompts_per_batch=4)
    assert found.right.tolist() == [1] * 6 and found.samples.tolist() == [7] * 6
    assert found.pass_at(1).value == pytest.approx(1 / 7) and found.pass_rate.tolist() == pytest.approx([1 / 7] * 6)
    assert [len(t) for t in found.texts] == [8] * 6
    with pytest.raises(UserError, match="at least 8 scored samples"):
        found.pass_at(8)


def test_evaluate_greedy_and_the_same_numbers_for_the_same_seed():
    task = _task(lambda text, row: float(bool(text) and ord(text[0]) % 2 == 0))
    a, b = (evaluate(small_policy(), task, samples=4, greedy=True, seed=3) for _ in range(2))
    assert a.texts == b.texts and set(a.greedy) <= {0.0, 1.0}
    with pytest.raises(UserError, match="no problem"):
        evaluate(small_policy(), task, [])


def test_a_problem_whose_scorer_always_fails_is_not_one_with_pass_rate_zero():
    task = _task(lambda text, row: None if row["n"] == 2 else float(row["n"] % 2))
    found = evaluate(small_policy(), task, samples=4, greedy=True)
    wanted = [0.0, 1.0, np.nan, 1.0, 0.0, 1.0]
    np.testing.assert_array_equal(found.pass_rate, wanted)
    np.testing.assert_array_equal(found.greedy, wanted)
    assert found.samples.tolist() == [4, 4, 0, 4, 4, 4] and found.pass_at(4).value == pytest.approx(3 / 5)


def test_rewards_between_0_and_1_have_a_mean_with_its_interval():
    """Sampled answers get n/10, n the problem, every other one twice that; problem 5 and one sample have no grade."""
    calls = itertools.count()

    def score(text, row):
        call = next(calls)
        return None if row["n"] == 5 or call == 0 else row["n"] / 10 * (1 + call % 2)

    found = evaluate(small_policy(), _task(score), samples=4, greedy=True)
    assert found.graded and not found.right.any() and found.scores.shape == (6, 4) and np.isnan(found.scores[5]).all()
    reward = found.mean_reward()
    assert reward.value == pytest.approx(np.mean([0.0, 0.15, 0.3, 0.45, 0.6]))
    assert reward.low < reward.value < reward.high
    assert found.mean_greedy_reward().value == pytest.approx(np.nanmean(found.greedy_scores))
    assert not np.nansum(found.greedy) and np.isnan(found.greedy[5])

    binary = evaluate(small_policy(), _task(lambda text, row: float(row["n"] % 2)), samples=2)
    assert not binary.graded and binary.mean_reward().value == binary.pass_at(1).value == 0.5
    with pytest.raises(UserError, match="greedy=True"):
        binary.mean_greedy_reward()


def _norms_written_out(policy, out, group, rewards, function):
    """|| (1/M) sum A grad log pi || of one group, by one plain backward pass."""
    values, total, prompt = function(rewards), 0.0, out.prompts[group]
    for row, a in zip((out.group == group).nonzero().flatten(), values):
        tokens = out.completions[row][out.mask[row]]
        logits = policy.model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1]
        total = total + a * logits.log_softmax(-1).gather(-1, tokens[:, None]).sum()
    grads = torch.autograd.grad(total / len(values), [p for _, p in policy.trainable()])
    return torch.cat([g.flatten() for g in grads]).norm().item()


@pytest.mark.parametrize("graded", [False, True])
def test_budget_norms_equal_the_definition(graded):
    """Binary rewards and rewards of several levels; all advantages on the very same groups."""
    policy = small_policy()

    def score(text, row):
        return (len(text) % 4) / 3 if graded else float(len(text) % 2)

    task = _task(score)
    functions = {n: advantages.get(n) for n in ("sage", "grpo", "rloo", "reinforce")}
    found = gradient_budget(
        policy, task, task.train[:3], functions, group_size=5, seed=4, pass_rate=np.array([0.1, 0.5, 0.95])
    )
    generator = torch.Generator().manual_seed(4)
    prompts = policy.encode([task.prompt(row, "short") for row in task.train[:3]])
    out = sample(policy, prompts, 5, max_new_tokens=6, generator=generator)
    rewards = torch.tensor([score(t, None) for t in out.texts]).view(3, 5)
    for i in range(3):
        for name, function in functions.items():
            expected = _norms_written_out(policy, out, i, rewards[i], function)
            assert found.norms[name][i, 0] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_budget_shares_bins_and_independence_of_the_rate_samples():
    found = GradientBudget(np.array([0.0, 0.2, 0.69, 0.7, 0.9, 1.0]), {"a": np.array([[1.0], [2], [3], [4], [5], [5]])})
    assert BINS == (0.0, 0.2, 0.5, 0.7, 0.9, 1.0) and found.bins.tolist() == [0, 1, 2, 3, 4, 4]
    shares = found.shares("a")
    assert [s.value for s in shares] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.5])
    assert all(s.low <= s.value <= s.high for s in shares)
    task = _task(lambda text, row: float(len(text) % 2))
    measured = gradient_budget(small_policy(), task, task.train, ["sage", "grpo"], group_size=2, groups=3)
    assert measured.norms["sage"].shape == (6, 3) and len(set((measured.pass_rate * 64).round(6) % 1)) == 1
    with pytest.raises(UserError, match="at least|>= 64"):
        gradient_budget(small_policy(), task, task.train, ["sage"], rate_samples=16)


def _budget(score, rows=3, **options):
    task = _task(score)
    return gradient_budget(small_policy(), task, task.train[:rows], ["sage"], group_size=4, **options)


def test_budget_leaves_failed_grades_out_of_the_pass_rate():
    """Every second grade fails, all others are right: p is 1, not one half."""
    calls = itertools.count()
    found = _budget(lambda text, row: None if next(calls) % 2 else 1.0)
    assert found.pass_rate.tolist() == [1.0] * 3 and found.bins.tolist() == [4] * 3
    with pytest.raises(UserError, match="no sample of problem 1 could be graded"):
        _budget(lambda text, row: None if row["n"] == 1 else 1.0)


def test_budget_bins_are_those_of_exact_pass_rates():
    """In float32, 90 of 100 is below .9 and 20 of 100 above .2: the edges must not depend on that."""
    calls, right = itertools.count(), [20, 70, 90]
    found = _budget(lambda text, row: float(next(calls) % 100 < right[row["n"]]), rate_samples=100)
    assert found.pass_rate.tolist() == [0.2, 0.7, 0.9] and found.bins.tolist() == [1, 3, 4]


@pytest.mark.parametrize("options, message", [
    ({"rows": 0}, "at least one problem"),
    ({"pass_rate": np.array([0.1])}, r"pass_rate must be \[3\], one number a problem, got shape \(1,\)"),
    ({"pass_rate": 0.5}, r"got shape \(\)"),
    ({"pass_rate": np.array([0.1, np.nan, 1.0])}, "pass_rate must lie in .0, 1., got nan"),
])  # fmt: skip
def test_budget_refuses_what_does_not_match(options, message):
    with pytest.raises(UserError, match=message):
        _budget(lambda text, row: 1.0, **options)
