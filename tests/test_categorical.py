"""The training loss, differentiated by autograd over every possible group, gives w(p) grad p; and where it cannot."""
from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_lite import advantages, categorical, theory
from sage_lite.categorical import Categorical
from sage_lite.errors import UserError

ALL = ["sage", "grpo", "dr_grpo", "rloo", "maxrl", "focal_grpo", "reinforce", "sign"]
every = pytest.mark.parametrize("name", ALL)
logit = st.floats(-3, 3)


def close(got, want, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


@every
@settings(max_examples=25)
@given(logits=st.lists(logit, min_size=2, max_size=4), m=st.integers(1, 5), data=st.data())
def test_expected_loss_gradient_is_the_prompt_weight_times_grad_p(name, logits, m, data):
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(logits), max_size=len(logits)))
    policy = Categorical(logits, rewards)
    weight = theory.prompt_weight(name, min(policy.pass_rate().item(), 1.0), m)
    close(policy.expected_gradient(name, m), -weight * policy.pass_rate_gradient())


@pytest.mark.parametrize("options", [{"kind": "cispo"}, {"normalization": "sequence"},
                                     {"normalization": "constant", "max_length": 1}])
@every
def test_on_policy_every_form_of_the_loss_has_the_same_gradient(name, options):
    policy = Categorical([0.3, -0.2, 0.5], [1, 0, 1])
    close(policy.expected_gradient(name, 3, **options), policy.expected_gradient(name, 3))


@every
def test_a_gradient_step_climbs_the_objective_at_the_predicted_rate(name):
    """Along the expected update u, dh/dt = h'(p) grad p . u with h' = w, so h's slope is |u|^2."""
    policy = Categorical([0.3, -0.2, 0.5], [1, 0, 1])
    update = -policy.expected_gradient(name, 4)

    def h(step):
        moved = Categorical(policy.logits.detach() + step * update, policy.rewards)
        return theory.objective(name, moved.pass_rate().item(), 4)

    assert (h(1e-4) - h(-1e-4)) / 2e-4 == pytest.approx(float(update.square().sum()), rel=1e-6)


def test_the_list_of_groups_is_a_distribution():
    answers, probability = Categorical([0.3, -0.2, 0.5], [1, 0, 1]).all_groups(4)
    assert answers.shape == (81, 4) and len({tuple(g) for g in answers.tolist()}) == 81
    close(probability.sum(), 1.0)
    with pytest.raises(UserError, match=r"3\^20"):
        Categorical([0.3, -0.2, 0.5], [1, 0, 1]).all_groups(20)


def test_sampled_gradient_averages_to_the_exact_one():
    policy = Categorical([0.5, 0.0, -1.0], [1.0, 0.0, 0.3])
    generator = torch.Generator().manual_seed(0)
    losses = [policy.loss("sage", policy.sample(500, 4, generator)) for _ in range(100)]
    sampled = torch.stack([torch.autograd.grad(loss, policy.logits)[0] for loss in losses])
    error = sampled.std(0) / 10
    assert ((sampled.mean(0) - policy.expected_gradient("sage", 4)).abs() < 5 * error).all()


def test_the_gradient_does_not_pass_through_the_advantage():
    policy = Categorical([0.3, -0.2], [1.0, 0.0])
    leak = lambda r: r - (policy.probs @ policy.rewards)  # noqa: E731 - baseline p, left attached to the logits
    close(policy.expected_gradient(leak, 2), -policy.pass_rate_gradient())


@pytest.mark.parametrize("groups", [None, 16])
def test_training_finds_the_right_answer(groups):
    policy = Categorical([0.0, 1.0, 0.0], [1, 0, 0])
    history = categorical.train(policy, "sage", 4, steps=40, lr=1.0, groups=groups,
                                generator=torch.Generator().manual_seed(1))
    assert history["probs"].shape == (41, 3) and history["pass_rate"].shape == (41,)
    close(history["pass_rate"][0], 1 / (2 + math.e))
    assert history["pass_rate"][-1] > 0.9
    close(policy.pass_rate().detach(), history["pass_rate"][-1])


def test_exact_training_is_the_ascent_of_the_weighted_pass_rate():
    policy, by_hand = (Categorical([0.0, 1.0], [1, 0]) for _ in range(2))
    categorical.train(policy, "grpo", 4, steps=3, lr=0.5)
    for _ in range(3):
        step = theory.prompt_weight("grpo", by_hand.pass_rate().item(), 4) * by_hand.pass_rate_gradient()
        by_hand.logits.data += 0.5 * step
    close(policy.logits.detach(), by_hand.logits.detach())


@pytest.mark.parametrize("logits, rewards, complaint", [
    ([0.0, 1.0], [1.0], r"\(2,\) and \(1,\)"), ([0.0, math.nan], [1.0, 0.0], "logits.*nan at index 1"),
    ([0.0, 1.0], [1.0, math.inf], "rewards.*inf at index 1"), ([[0.0]], [[1.0]], "shapes"),
    ([0, 0], [1.0, None], "rewards.*None"), ([0, None], [1.0, 0.0], "logits.*None"), ([0, 1j], [1, 0], "logits"),
    (torch.zeros(2), torch.tensor([1.0, 1j]), "rewards.*complex"),
])
def test_bad_policies(logits, rewards, complaint):
    with pytest.raises(UserError, match=complaint):
        Categorical(logits, rewards)


def test_a_list_of_rewards_keeps_its_digits():
    assert Categorical([0.0, 0.1], [0.1, 1.0]).rewards[0].item() == 0.1


@pytest.mark.parametrize("own, complaint", [
    (lambda r: r / r.mean(-1, keepdim=True), r"nan.*\[0, 0"), (lambda r: r.mean(-1, keepdim=True), "shape"),
    (lambda r: r.mean(), "shape"),
])
def test_a_readers_function_is_looked_at(own, complaint):
    policy = Categorical([0.0, 0.0], [1.0, 0.0])
    for call in (lambda: policy.expected_gradient(own, 2), lambda: policy.loss(own, policy.sample(50, 2)),
                 lambda: categorical.train(policy, own, 2, steps=1),
                 lambda: categorical.pair_advantages(own, [0.0, 1.0])):
        with pytest.raises(UserError, match=complaint):
            call()


# --- groups of two, three reward levels -----------------------------------------------------------------------------

LOG2 = math.log(2)


def test_sage_has_no_objective_at_three_reward_levels():
    worth = [Fraction(1), Fraction(2), Fraction(4)]  # exp(r / tau) for rewards 0, tau log 2, 2 tau log 2
    pairs = [[2 * a / (a + b) - 1 for b in worth] for a in worth]
    assert categorical.cross_partials(pairs) == (Fraction(-1, 15), Fraction(1, 15))
    assert Fraction(1, 3) * Fraction(1, 3) * Fraction(3, 5) == Fraction(1, 15)  # tanh a * tanh b * tanh(a + b)
    tau = 0.3
    measured = categorical.pair_advantages(advantages.get("sage", tau=tau), [0.0, tau * LOG2, 2 * tau * LOG2])
    close(measured, [[float(x) for x in row] for row in pairs])


@pytest.mark.parametrize("name, parameters, mismatch", [
    ("grpo", {"eps": 0}, 1.0), ("dr_grpo", {}, 0.0), ("rloo", {}, 0.0), ("reinforce", {}, 0.0),
])
def test_cross_partials_of_other_advantages(name, parameters, mismatch):
    pairs = categorical.pair_advantages(advantages.get(name, **parameters), [0.0, LOG2, 2 * LOG2])
    first, second = categorical.cross_partials(pairs)
    close(first - second, -2 * mismatch)
    if mismatch:
        close(torch.stack([first, second]), [-mismatch, mismatch])


def test_cross_partials_are_derivatives_of_the_update():
    """By autograd, F_i = V_i - V_3 at an inner point of the simplex."""
    pairs = categorical.pair_advantages("sage", [0.0, 0.05, 0.2])
    x = torch.tensor([0.2, 0.3], dtype=torch.float64)

    def components(x):
        v = pairs @ torch.cat([x, 1 - x.sum(0, keepdim=True)])
        return v[:2] - v[2]

    jacobian = torch.autograd.functional.jacobian(components, x)
    close(torch.stack(categorical.cross_partials(pairs)), [jacobian[0, 1], jacobian[1, 0]])


@every
def test_update_field_is_the_expected_update(name):
    rewards = [0.0, 0.4, 1.0]
    logits = torch.tensor([[0.3, -0.2, 0.5], [0.0, 2.0, -1.0]], dtype=torch.float64)
    field = categorical.update_field(categorical.pair_advantages(name, rewards), logits)
    for got, point in zip(field, logits):
        close(got, -Categorical(point, rewards).expected_gradient(name, 2))


@pytest.mark.parametrize("own, complaint", [
    (lambda r: r - r.mean(), "other groups"), (lambda r: r - r[..., :1], "order"),
])
def test_pairs_of_what_is_no_group_advantage(own, complaint):
    with pytest.raises(UserError, match=complaint):
        categorical.pair_advantages(own, [0.0, 0.4, 1.0])


@pytest.mark.parametrize("rewards, complaint", [([0.0, None], "None"), ([[0.0, 1.0]], r"\(1, 2\)")])
def test_pairs_need_one_number_an_answer(rewards, complaint):
    with pytest.raises(UserError, match=complaint):
        categorical.pair_advantages("sage", rewards)


def test_cross_partials_need_three_answers():
    with pytest.raises(UserError, match="3 x 3"):
        categorical.cross_partials([[0, 1], [-1, 0]])
