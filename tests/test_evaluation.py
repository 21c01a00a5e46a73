from __future__ import annotations

import itertools

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


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = [(i := bootstrap(rng.random(60) < 0.3, resamples=300, seed=s)).low <= 0.3 <= i.high for s in range(200)]
    assert 0.88 < np.mean(hits) < 0.99
    assert bootstrap([2.0, 2.0]).low == bootstrap([2.0, 2.0]).high == 2.0
    with pytest.raises(UserError, match="at least one"):
        bootstrap([])


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
