"""A softmax policy over a few answers, where every expectation is a finite sum: the probe for theory and losses.

One prompt, A possible answers with known rewards, float64 logits. The expected gradient of the training loss is
computed by listing all A^M groups, so it can be compared with w(p) grad p to rounding. For groups of two and three
reward levels the update field shows why no single objective stands behind it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_lite import advantages, checks
from sage_lite.errors import UserError
from sage_lite.losses import policy_loss

MAX_TOKENS = 4_000_000  # rollouts in the list of all groups: M * A^M

Advantage = str | Callable[..., Tensor]


class Categorical:
    """Softmax policy pi = softmax(logits) over A answers, answer a worth rewards[a].

    `logits[A]` become a float64 leaf that requires grad; `rewards[A]` are any finite numbers. Raises UserError if the
    lengths differ or a number is not finite.
    """

    def __init__(self, logits: Tensor | Sequence[float], rewards: Tensor | Sequence[float]) -> None:
        start = checks.reward_groups(logits, "logits", double=True)
        self.logits = start.clone().requires_grad_()
        self.rewards = checks.reward_groups(rewards, double=True).clone()
        if self.logits.dim() != 1 or self.logits.shape != self.rewards.shape:
            raise UserError(f"logits[A] and rewards[A] must be one number an answer each, "
                            f"got shapes {tuple(self.logits.shape)} and {tuple(self.rewards.shape)}")

    @property
    def probs(self) -> Tensor:
        """pi[A], differentiable in the logits."""
        return self.logits.softmax(-1)

    def pass_rate(self) -> Tensor:
        """p = sum of pi[a] * rewards[a]: the pass rate for 0/1 rewards, the mean reward otherwise. Differentiable."""
        return self.probs @ self.rewards

    def pass_rate_gradient(self) -> Tensor:
        """grad p by autograd, [A]."""
        return torch.autograd.grad(self.pass_rate(), self.logits)[0]

    def sample(self, groups: int, group_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Answers [groups, M], drawn independently from the policy."""
        count, m = checks.group_size(groups), checks.group_size(group_size)
        return self.probs.detach().multinomial(count * m, replacement=True, generator=generator).view(count, m)

    def all_groups(self, group_size: int) -> tuple[Tensor, Tensor]:
        """Every group of M answers, [A^M, M], and its probability under the policy, [A^M].

        Raises UserError where that list would be too long.
        """
        m, a = checks.group_size(group_size), len(self.rewards)
        if m * a**m > MAX_TOKENS:
            raise UserError(f"{a} answers in groups of {m} make {a}^{m} groups, too many to list: use fewer of either")
        answers = torch.cartesian_prod(*[torch.arange(a)] * m).view(-1, m)
        return answers, self.probs.detach()[answers].prod(-1)

    def loss(self, advantage: Advantage, answers: Tensor, weights: Tensor | None = None, **options: Any) -> Tensor:
        """The training loss (`losses.policy_loss`, one token a rollout) of groups of answers [G, M].

        The mean over groups, or their sum with `weights[G]` >= 0. `options` go to `policy_loss`. Differentiable.
        """
        a = advantages.apply(advantage, self.rewards[answers])
        if weights is not None:  # min(rho A, clip(rho) A) scales with A, so a group's weight may sit on its advantages
            a = a * weights[:, None] * len(answers)
        logprobs = self.logits.log_softmax(-1)[answers].reshape(-1, 1)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        return policy_loss(logprobs, logprobs.detach(), a.reshape(-1), mask, **options)[0]

    def expected_gradient(self, advantage: Advantage, group_size: int, **options: Any) -> Tensor:
        """Gradient [A] of the loss, averaged exactly over all groups: -w(p) grad p for 0/1 rewards.

        `advantage` is a name or a callable. `options` go to `losses.policy_loss`.
        """
        answers, weights = self.all_groups(group_size)
        return torch.autograd.grad(self.loss(advantage, answers, weights, **options), self.logits)[0]


def train(policy: Categorical, advantage: Advantage, group_size: int, *, steps: int = 100, lr: float = 1.0,
          groups: int | None = None, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Plain gradient descent on the loss, in place: with the exact gradient, or from `groups` sampled groups a step.

    Returns {"pass_rate": [steps + 1], "probs": [steps + 1, A]}, the start included.
    """
    lr = checks.number("lr", lr, above=0.0)
    probs = [policy.probs.detach()]
    for _ in range(steps):
        if groups is None:
            gradient = policy.expected_gradient(advantage, group_size)
        else:
            loss = policy.loss(advantage, policy.sample(groups, group_size, generator))
            gradient = torch.autograd.grad(loss, policy.logits)[0]
        with torch.no_grad():
            policy.logits -= lr * gradient
        probs.append(policy.probs.detach())
    history = torch.stack(probs)
    return {"pass_rate": history @ policy.rewards, "probs": history}


def pair_advantages(advantage: Advantage, rewards: Tensor | Sequence[float]) -> Tensor:
    """For groups of two: entry [a, b] is the advantage of answer a when the other rollout is b. [A, A], float64.

    Raises UserError for an advantage that `scalar.level_table` refuses, too.
    """
    r = checks.reward_groups(rewards, double=True)
    if r.dim() != 1:
        raise UserError(f"rewards[A] must be one number an answer, got shape {tuple(r.shape)}")
    a, b = torch.broadcast_tensors(r[:, None], r[None, :])
    return advantages.apply_symmetric(advantage, torch.stack([a, b], dim=-1))[..., 0].double()


def update_field(pairs: Tensor, logits: Tensor) -> Tensor:
    """Expected update (minus the loss gradient) of groups of two at many logits at once: [..., A] -> [..., A].

    With V = pairs @ pi: pi * (V - sum(pi * V)), the softmax's chain rule. `pairs` from `pair_advantages`.
    """
    pi = logits.to(pairs.dtype).softmax(-1)
    v = pi @ pairs.T
    return pi * (v - (pi * v).sum(-1, keepdim=True))


def cross_partials(pairs: Any) -> tuple[Any, Any]:
    """The two cross partials, dF_1/dpi_2 and dF_2/dpi_1, of the update of three answers in groups of two.

    The update is the form sum_a V_a dpi_a with V = pairs @ pi; with pi_3 = 1 - pi_1 - pi_2 it has the two components
    F_i = V_i - V_3. Some objective has this update as its gradient only if both are equal. F is linear in pi, so a
    partial is a difference between two corners of the simplex: `pairs`, a 3 x 3 nested sequence of Fractions, gives
    exact Fractions; numbers give numbers.
    """
    if len(pairs) != 3 or any(len(row) != 3 for row in pairs):
        raise UserError("cross_partials needs the 3 x 3 pair advantages of three answers")

    def corner(i: int, answer: int) -> Any:  # F_i where pi is all on `answer`
        return pairs[i][answer] - pairs[2][answer]

    return corner(0, 1) - corner(0, 2), corner(1, 0) - corner(1, 2)
