from __future__ import annotations

import dataclasses

import pytest
import torch
from small_models import small_policy

from sage_lite import advantages
from sage_lite.errors import UserError
from sage_lite.recipes import RECIPES, recipe
from sage_lite.rollout import Rollouts, sample
from sage_lite.update import dead_groups, group_advantages, micro_batches, update

NAN = float("nan")


class NoStep(torch.optim.SGD):
    """Keeps the gradient and leaves the weights alone."""

    def step(self, closure=None):
        pass


def _batch(policy, groups=5, size=4, seed=0):
    prompts = policy.encode([f"{i} {'9 ' * i}= 3" for i in range(groups)])
    rollouts = sample(policy, prompts, size, max_new_tokens=6, generator=torch.Generator().manual_seed(seed))
    successes = torch.tensor([4, 0, 1, 2, 3])[:groups]  # two dead groups, three that teach
    return rollouts, (torch.arange(size) < successes[:, None]).float()


def _gradient(policy, rollouts, rewards, name="sage", change=None, **options):
    method = dataclasses.replace(recipe(name), **(change or {}))
    values = group_advantages(advantages.get(method.advantage, **method.advantage_params), rewards)
    optimizer = NoStep([p for _, p in policy.trainable()], lr=1.0)
    policy.model.zero_grad()
    numbers = update(policy, optimizer, rollouts, rewards, values, method, grad_clip=0.0, max_length=6, **options)
    return torch.cat([p.grad.flatten() for _, p in policy.trainable()]).clone(), numbers


def _close(a, b, tolerance=1e-5):
    assert (a - b).norm() <= tolerance * b.norm(), ((a - b).norm() / b.norm()).item()


def test_dead_groups_look_past_missing_rewards():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [NAN, 1.0], [NAN, NAN]])
    assert dead_groups(rewards).tolist() == [True, False, True, True]


def test_missing_rewards_leave_their_group_and_nothing_else():
    sage = advantages.get("sage")
    rewards = torch.tensor([[1.0, NAN, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [NAN] * 4])
    values = group_advantages(sage, rewards)
    torch.testing.assert_close(values[0, [0, 2, 3]], sage(torch.tensor([1.0, 0.0, 0.0])))
    assert values[0, 1] == 0 and values[2].tolist() == [0.0] * 4
    torch.testing.assert_close(values[1], sage(rewards[1]))


@pytest.mark.parametrize(("own", "message"), [
    (lambda r: r / r.mean(-1, keepdim=True) - 1, r"nan for the group of rewards \[0, 0"),
    (lambda r: r.mean(-1, keepdim=True), "shape"),
])
def test_a_readers_function_is_looked_at(own, message):
    for rewards in ([[1.0, 0.0, 0.0, 1.0], [0.0] * 4], [[1.0, NAN, 0.0, 1.0], [0.0] * 4]):
        with pytest.raises(UserError, match=message):
            group_advantages(own, torch.tensor(rewards))


def test_a_function_in_place_leaves_the_rewards_alone():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    values = group_advantages(lambda r: r.sub_(r.mean(-1, keepdim=True)), rewards)
    assert values.tolist() == [[0.5, -0.5, -0.5, 0.5]] and rewards.tolist() == [[1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_savings_are_exact(name):
    """Shared prompts, skipped dead groups and micro-batches of any size give the plain full-batch gradient."""
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    plain, _ = _gradient(
        policy, rollouts, rewards, name, share_prompts=False, skip_dead_groups=False, micro_batch_tokens=10**9
    )
    for most_tokens in (1, 60, 200, 10**9):
        fast, _ = _gradient(policy, rollouts, rewards, name, micro_batch_tokens=most_tokens)
        _close(fast, plain)


def test_gradient_equals_the_loss_written_out():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    found, _ = _gradient(policy, rollouts, rewards)
    values, total = advantages.sage(rewards).reshape(-1), 0.0
    for i, (tokens, live) in enumerate(zip(rollouts.completions, rollouts.mask)):
        prompt, tokens = rollouts.prompts[i // 4], tokens[live]
        logp = policy.model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total = total + values[i] * logp.gather(-1, tokens[:, None]).sum()
    grads = torch.autograd.grad(-total / rollouts.mask.sum(), [p for _, p in policy.trainable()])
    _close(found, torch.cat([g.flatten() for g in grads]))


def test_dropping_dead_groups_takes_their_tokens_out_of_the_count():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    kept, _ = _gradient(policy, rollouts, rewards, "grpo")
    dropped, _ = _gradient(policy, rollouts, rewards, "dapo")
    live = rollouts.mask.view(5, 4, -1)[2:].sum()
    _close(dropped, kept * (rollouts.mask.sum() / live))


def test_a_missing_reward_takes_its_tokens_out_too():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    rewards[3] = torch.tensor([1.0, 0.0, NAN, 0.0])
    with_gap, _ = _gradient(policy, rollouts, rewards)
    gone = rollouts.mask.clone()
    gone[14] = False
    removed = dataclasses.replace(rollouts, mask=gone)
    filled = rewards.clone()
    filled[3] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    values = group_advantages(advantages.get("sage"), rewards)
    optimizer = NoStep([p for _, p in policy.trainable()], lr=1.0)
    update(policy, optimizer, removed, filled, values, recipe("sage"), grad_clip=0.0)
    _close(with_gap, torch.cat([p.grad.flatten() for _, p in policy.trainable()]))


@pytest.mark.parametrize(("width", "missing"), [(512, [(0, 1)]), (256, [(0, 0), (1, 3)])])
def test_rollouts_without_a_reward_need_no_token(width, missing):
    """Beside long ones they are a bucket of their own, of length 0."""
    policy = small_policy(max_position_embeddings=1024)
    tokens = torch.randint(3, 20, (8, width), generator=torch.Generator().manual_seed(0))
    rollouts = Rollouts(policy.encode(["1 2 = 3", "4 = 4"]), tokens, torch.ones_like(tokens).bool(),
                        torch.zeros(8).bool(), [""] * 8, 4)  # fmt: skip
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    for at in missing:
        rewards[at] = NAN
    fast, numbers = _gradient(policy, rollouts, rewards)
    assert numbers["grad_norm"] > 0
    _close(fast, _gradient(policy, rollouts, rewards, share_prompts=False)[0])


@pytest.mark.parametrize("share", [True, False])
def test_a_group_without_any_reward_may_be_a_micro_batch_of_its_own(share):
    policy = small_policy()
    policy.reference_model = small_policy(seed=1).model
    rollouts, rewards = _batch(policy)
    rewards[2] = NAN
    wanted, before = _gradient(policy, rollouts, rewards, beta=0.1, share_prompts=share, micro_batch_tokens=10**6)
    found, numbers = _gradient(policy, rollouts, rewards, beta=0.1, share_prompts=share, micro_batch_tokens=1)
    _close(found, wanted)
    assert numbers["kl"] == pytest.approx(before["kl"], rel=1e-4)


@pytest.mark.parametrize(("groups", "minibatches", "steps"), [(5, 4, 4), (5, 5, 5), (4, 3, 3)])
def test_there_are_as_many_steps_as_minibatches(groups, minibatches, steps):
    policy = small_policy()
    rollouts, rewards = _batch(policy, groups)
    rewards[:, 0], rewards[:, 1] = 0.0, 1.0  # every group teaches
    optimizer = NoStep([p for _, p in policy.trainable()], lr=1.0)
    numbers = update(policy, optimizer, rollouts, rewards, advantages.sage(rewards), recipe("sage"),
                     minibatches=minibatches)  # fmt: skip
    assert numbers["optimizer_steps"] == steps


def test_with_a_kl_term_dead_groups_are_computed():
    policy = small_policy()
    policy.reference_model = small_policy(seed=1).model
    rollouts, rewards = _batch(policy)
    rewards[:] = 0.0
    values = torch.zeros_like(rewards)
    optimizer = torch.optim.SGD([p for _, p in policy.trainable()], lr=0.1)
    numbers = update(policy, optimizer, rollouts, rewards, values, recipe("sage"), beta=0.1)
    assert numbers["kl"] > 0 and numbers["grad_norm"] > 0 and numbers["optimizer_steps"] == 1


def test_several_minibatches_use_the_old_policy_and_clip():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    rewards[0, 0], rewards[1, 0] = 0.0, 1.0
    values = advantages.sage(rewards)
    optimizer = torch.optim.SGD([p for _, p in policy.trainable()], lr=3.0)
    numbers = update(policy, optimizer, rollouts, rewards, values, recipe("sage"), minibatches=3, grad_clip=0.0,
                     generator=torch.Generator().manual_seed(0))  # fmt: skip
    assert numbers["optimizer_steps"] == 3 and numbers["ratio_max"] > 1.0 and numbers["clip_share"] > 0.0
    single = update(policy, optimizer, rollouts, rewards, values, recipe("sage"), minibatches=1)
    assert single["ratio_max"] == 1.0 and single["clip_share"] == 0.0


@pytest.mark.parametrize("most", [1, 30, 100, 10_000])
def test_micro_batches_cover_all_groups_within_the_limit(most):
    lengths = torch.tensor([[4, 10], [4, 3], [4, 25], [4, 7], [4, 7]])
    parts = list(micro_batches(lengths, most))
    assert sorted(torch.cat(parts).tolist()) == [0, 1, 2, 3, 4]
    for part in parts:
        assert len(part) == 1 or lengths[part, 0].sum() * lengths[part, 1].max() <= most
