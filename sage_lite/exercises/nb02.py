"""Exercises of notebook 02: the one line, RLOO, the completion mask, the clipped surrogate, k3, micro-batches.

Solutions stand here in plain torch and call nothing of the library; checkers hold answers against the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sage_lite import advantages
from sage_lite.exercises import NotYet, agree, exercise, expect
from sage_lite.losses import kl_k3, loss_denominator, policy_loss

NAN_HINT = "your result is not a finite number"


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _finite(value: Tensor, hint: str) -> None:
    if not torch.as_tensor(value).isfinite().all():
        raise NotYet(f"{NAN_HINT}: {hint}")


# -- 02.1 ----------------------------------------------------------------------------------------------------------


def _sage(rewards: Tensor, tau: float) -> Tensor:
    return rewards.shape[-1] * torch.softmax(rewards / tau, dim=-1) - 1


def _sage_naive(rewards: Tensor, tau: float) -> Tensor:
    weights = torch.exp(rewards / tau)
    return rewards.shape[-1] * weights / weights.sum(-1, keepdim=True) - 1


_SAGE_MISTAKES = {
    "each group must sum to zero: is the -1 missing?": lambda r, tau: _sage(r, tau) + 1,
    "the softmax must be multiplied by the group size M": lambda r, tau: torch.softmax(r / tau, -1) - 1,
    "divide the rewards by tau, do not multiply": lambda r, tau: _sage(r, 1 / tau),
    "tau is not used": lambda r, tau: _sage(r, 1.0),
    "the group is the last axis (dim=-1)": lambda r, tau: r.shape[-1] * torch.softmax(r / tau, 0) - 1,
}


@exercise("02.1", "Write the one line", difficulty=1, minutes=5, solution=_sage, wrong=[
    *[(mistaken, message) for message, mistaken in _SAGE_MISTAKES.items()],
    (_sage_naive, "largest reward first"),
    (lambda r, tau: _sage_naive(r - r.max(), tau), "each group's largest"),
    (lambda r, tau: _sage_naive((r / tau).clamp(max=80), 1.0), "two groups at tau = 0.001"),
    (lambda r, tau: torch.tensor([2.99946, -0.99982, -0.99982, -0.99982]), "expected shape"),
])
def _check_sage(answer) -> None:
    cases = [(_random(2, 3), 0.5), (_random(4, 6, seed=1), 0.3), (torch.tensor([[1.0, 0.0, 0.0, 0.0]]), 0.1)]
    agree(answer, advantages.sage, cases, names=("rewards", "tau"), mistakes=_SAGE_MISTAKES)
    c = torch.tensor(2.0).log().item()  # tau = 1 / ln 2 turns e^{r/tau} into 2^r
    expect(answer(torch.tensor([[2.0, 1.0, 0.0]]), 1 / c), [[5 / 7, -1 / 7, -4 / 7]], "rewards [2, 1, 0] at 2^r")
    sharp = torch.tensor([[1.0, 0.9, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0]])
    _finite(answer(sharp, 1e-3), "e^1000 overflows at tau = 0.001; subtract each group's largest reward first")
    expect(answer(sharp, 1e-3), [[3.0, -1.0, -1.0, -1.0]] * 2, "two groups at tau = 0.001")


# -- 02.2 ----------------------------------------------------------------------------------------------------------


def _rloo(rewards: Tensor) -> Tensor:
    m = rewards.shape[-1]
    return (rewards - rewards.mean(-1, keepdim=True)) * (m / max(m - 1, 1))


_RLOO_MISTAKES = {
    "this is r - mean of all M rewards, the rollout's own included": lambda r: r - r.mean(-1, keepdim=True),
    "the factor is upside down": lambda r: (r - r.mean(-1, keepdim=True)) * ((r.shape[-1] - 1) / r.shape[-1]),
    "the group is the last axis (dim=-1)": lambda r: (r - r.mean(0, keepdim=True)) * (r.shape[0] / (r.shape[0] - 1)),
    "the sum of the others must be divided by their number, M - 1": lambda r: r - (r.sum(-1, keepdim=True) - r),
}


@exercise("02.2", "RLOO from Dr. GRPO", difficulty=1, minutes=4, solution=_rloo, wrong=[
    *[(mistaken, message) for message, mistaken in _RLOO_MISTAKES.items()],
    (lambda r: (r - r.mean(-1, keepdim=True)) * r.shape[-1] / (r.shape[-1] - 1), "a group of one"),
    (lambda r: r - (r.sum(-1, keepdim=True) - r) / max(r.shape[-1] - 1, 1), "a group of one"),
])
def _check_rloo(answer) -> None:
    agree(answer, advantages.rloo, [(_random(2, 3),), (_random(5, 8, seed=1),)], names=("rewards",),
          mistakes=_RLOO_MISTAKES)
    expect(answer(torch.tensor([[1.0, 0.0, 0.0, 0.0]])), [[1.0, -1 / 3, -1 / 3, -1 / 3]], "rewards [1, 0, 0, 0]")
    expect(answer(torch.tensor([[1.0]])), [[0.0]], "a group of one compares with nobody, its advantage is 0")


# -- 02.3 ----------------------------------------------------------------------------------------------------------


def _mask(tokens: Tensor, eos: int) -> Tensor:
    ends = (tokens == eos).long()
    return ends.cumsum(-1) - ends == 0


_MASK_MISTAKES = {
    "the EOS itself is sampled, and trained on: keep the first one": lambda t, eos: (t == eos).cumsum(-1) == 0,
    "the EOS itself is sampled, and trained on: keep the first one and nothing behind it": lambda t, eos: t != eos,
    "with pad = EOS every row may hold many: keep nothing after the first": lambda t, eos: torch.ones_like(t).bool(),
    "a token before the first EOS must stay; this keeps the others": lambda t, eos: ~_mask(t, eos),
    "nothing behind the first EOS is live, whatever token it is": lambda t, eos: (t == eos).cumsum(-1) <= 1,
    "what follows a token behind the first EOS is not live either": lambda t, eos: torch.cat(
        [torch.ones_like(t[..., :1]).bool(), t[..., :-1] != eos], -1),
}


def _mask_drops_cut_off(tokens: Tensor, eos: int) -> Tensor:
    return _mask(tokens, eos) & (tokens == eos).any(-1, keepdim=True)


@exercise("02.3", "The completion mask", difficulty=2, minutes=6, solution=_mask, wrong=[
    *[(mistaken, message) for message, mistaken in _MASK_MISTAKES.items()],
    (lambda t, eos: t != eos, "the EOS itself is sampled"),
    (_mask_drops_cut_off, "cut off by the length limit"),
    (lambda t, eos: torch.tensor([[True, True, True, False, False]]), "expected shape"),
])
def _check_mask(answer) -> None:
    from sage_lite.rollout import completion_mask  # here, since it brings in the language-model libraries

    g = torch.Generator().manual_seed(0)
    cases = [(torch.tensor([[5, 7, 2, 2, 2]]), 2)]
    for length in range(1, 7):  # a random completion, its EOS, then padding with the same token
        tokens = torch.randint(3, 9, (2, 7), generator=g)
        tokens[0, length:], tokens[1, length - 1:] = 0, 0
        cases.append((tokens, 0))
    cases.append((torch.tensor([[5, 7, 2, 0, 0], [5, 2, 7, 2, 0]]), 2))  # other tokens behind the first EOS
    agree(answer, completion_mask, cases, names=("tokens", "eos"), mistakes=_MASK_MISTAKES)
    cut = torch.tensor([[5, 7, 4, 4]])
    expect(answer(cut, 2), [[1, 1, 1, 1]], "a completion cut off by the length limit has no EOS and stays whole")


# -- 02.4 ----------------------------------------------------------------------------------------------------------


def _surrogate(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def _surrogate_from_library(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Minus the loss of one rollout of one token, for each token."""
    one = torch.ones(1, 1)
    return torch.stack([-policy_loss(r.log().view(1, 1), torch.zeros(1, 1), a.view(1), one, clip_low=clip_low,
                                     clip_high=clip_high)[0] for r, a in zip(ratio, advantage)])


_SURROGATE_MISTAKES = {
    "only clipped: the minimum with ratio * advantage is missing": lambda r, a, lo, hi: r.clamp(1 - lo, 1 + hi) * a,
    "nothing is clipped": lambda r, a, lo, hi: r * a,
    "take the smaller of the two, not the larger": lambda r, a, lo, hi: -_surrogate(r, -a, lo, hi),
    "clip_high belongs above 1 and clip_low below": lambda r, a, lo, hi: _surrogate(r, a, hi, lo),
    "this is the loss: the surrogate has no minus": lambda r, a, lo, hi: -_surrogate(r, a, lo, hi),
    "clip_low and clip_high are distances from 1": lambda r, a, lo, hi: torch.minimum(r * a, r.clamp(lo, hi) * a),
    "the minimum is over the ratios; take it after multiplying, since A may be negative":
        lambda r, a, lo, hi: torch.minimum(r, r.clamp(1 - lo, 1 + hi)) * a,
}


@exercise("02.4", "The clipped surrogate", difficulty=2, minutes=8, solution=_surrogate, wrong=[
    *[(mistaken, message) for message, mistaken in _SURROGATE_MISTAKES.items()],
])
def _check_surrogate(answer) -> None:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.25, 2.0, 0.5, 0.9, 1.0, 1.25, 2.0], dtype=torch.float64)
    sign = torch.tensor([1.0] * 5 + [-1.0] * 5, dtype=torch.float64)
    cases = [(ratio, sign, 0.2, 0.28), ((_random(12) / 2).exp(), _random(12, seed=1), 0.1, 0.4)]
    agree(answer, _surrogate_from_library, cases, mistakes=_SURROGATE_MISTAKES,
          names=("ratio", "advantage", "clip_low", "clip_high"))
    expect(answer(ratio, sign, 0.2, 0.28), [0.5, 0.9, 1, 1.25, 1.28, -0.8, -0.9, -1, -1.25, -2], "clips 0.2 and 0.28")


# -- 02.5 ----------------------------------------------------------------------------------------------------------


def _k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = (ref_logprobs - logprobs).clamp(-20, 20)
    return torch.exp(d) - d - 1


def _k3_naive(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = ref_logprobs - logprobs
    return torch.exp(d) - d - 1


def _k3_clamped_after(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    d = ref_logprobs - logprobs
    return torch.exp(d).clamp(max=5e8) - d - 1


_K3_MISTAKES = {
    "the difference is the wrong way round: d = ref - log pi": lambda logp, ref: _k3_naive(ref, logp),
    "this is k1 = log pi - ref, which can be negative": lambda logp, ref: logp - ref,
    "this is k2 = d^2 / 2": lambda logp, ref: (ref - logp).square() / 2,
    "is the -1 missing? k3 is 0 where both policies agree": lambda logp, ref: _k3(logp, ref) + 1,
}


@exercise("02.5", "k3 that survives", difficulty=2, minutes=6, solution=_k3, wrong=[
    *[(mistaken, message) for message, mistaken in _K3_MISTAKES.items()],
    (_k3_naive, "e^100 overflows"),
    (_k3_clamped_after, "clamp before"),
    (lambda logp, ref: _k3(logp, ref).detach(), "no gradient"),
])
def _check_k3(answer) -> None:
    cases = [(-_random(3, 4).abs(), -_random(3, 4, seed=1).abs()), (torch.tensor([[-1.0]]), torch.tensor([[-2.0]]))]
    agree(answer, kl_k3, cases, names=("logprobs", "ref_logprobs"), mistakes=_K3_MISTAKES)
    expect(answer(torch.zeros(1), torch.tensor([2.0]).log()), [1 - torch.tensor(2.0).log().item()], "d = log 2")
    logprobs = torch.tensor([-100.5, -1.5], requires_grad=True)
    value = answer(logprobs, torch.tensor([-0.5, -0.5]))
    _finite(value, "e^100 overflows in float32")
    if not value.requires_grad:
        raise NotYet("there is no gradient: logprobs must reach the result (no detach, no .item())")
    slope = torch.autograd.grad(value.sum(), logprobs)[0]
    _finite(slope, "the value is finite but its gradient is not; clamp before the exponential, not after")
    expect(slope[1], 1 - torch.tensor(1.0).exp(), "the gradient at d = 1")


# -- 02.6 ----------------------------------------------------------------------------------------------------------


def _split_loss(gains: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    total = sum(mask.sum() for mask in masks)
    return [-(gain * mask).sum() / total for gain, mask in zip(gains, masks)]


_SPLIT_MISTAKES = {
    "each part is divided by its own token count; use that of the whole batch":
        lambda gains, masks: [-(g * m).sum() / m.sum() for g, m in zip(gains, masks)],
    "the mean of the two means weighs a token of the shorter part more":
        lambda gains, masks: [-(g * m).sum() / m.sum() / len(masks) for g, m in zip(gains, masks)],
    "this divides by padding, too": lambda gains, masks: [-(g * m).sum() / sum(m.numel() for m in masks)
                                                          for g, m in zip(gains, masks)],
    "dead positions must not count in the sum": lambda gains, masks: [-g.sum() / sum(m.sum() for m in masks)
                                                                      for g in gains],
    "a loss is minimised: the minus is missing": lambda gains, masks: [-x for x in _split_loss(gains, masks)],
    "this divides by the number of rollouts": lambda gains, masks: [-(g * m).sum() / sum(len(m) for m in masks)
                                                                    for g, m in zip(gains, masks)],
}


@exercise("02.6", "The token mean over two micro-batches", difficulty=3, minutes=10, solution=_split_loss, wrong=[
    *[(mistaken, message) for message, mistaken in _SPLIT_MISTAKES.items()],
    (lambda gains, masks: sum(_split_loss(gains, masks)), "expected shape"),
])
def _check_split_loss(answer) -> None:
    """Gains are per-token surrogates; on policy (logprobs 0) the library's loss of a rollout with one gain A is -A."""
    cases = []
    for seed in range(3):
        gains = [_random(2, 5, seed=seed), _random(3, 5, seed=seed + 10)]
        lengths = [torch.tensor([[5], [4]]), torch.tensor([[1], [2 + seed], [1]])]
        cases.append((gains, [torch.arange(5) < length for length in lengths]))
    agree(answer, _split_loss_from_library, cases, mistakes=_SPLIT_MISTAKES, names=("gains", "masks"))
    long, short = torch.ones(1, 8), -torch.ones(3, 8)
    masks = [torch.arange(8) < 8 * torch.ones(1, 1), torch.arange(8) < torch.ones(3, 1)]
    expect(answer([long, short], masks), [-8 / 11, 3 / 11], "one rollout of 8 tokens with gain 1, three of 1 with -1")


def _split_loss_from_library(gains: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    tokens = sum(loss_denominator(mask) for mask in masks)
    return [_sum_of_token_losses(gain, mask) / tokens for gain, mask in zip(gains, masks)]


def _sum_of_token_losses(gain: Tensor, mask: Tensor) -> Tensor:
    """Every token as a rollout of its own, so that its gain can be its advantage."""
    zero, live = torch.zeros(gain.numel(), 1, dtype=gain.dtype), mask.reshape(-1, 1)
    return policy_loss(zero, zero, gain.reshape(-1), live, denominator=1.0)[0]
