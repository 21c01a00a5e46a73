"""A classifier trained like a policy: one rollout is one label sampled from the softmax, its reward is "is it right".

An image with label y has the pass rate p = softmax(logits)[y]; its M sampled labels are a group. Three losses have the
same expected gradient, w(p) grad p = p w(p) grad log p (`sage_lite.theory`), and differ in what they sample:

- `sampled_label_loss` draws the M labels: the estimator to the letter;
- `conditional_label_loss` draws only how many of them are right, K ~ Binomial(M, p), and averages the rest out;
- `expected_label_loss` draws nothing.

Cross-entropy is the case p w(p) = 1, so `relative_speed`, p w(p), says how fast a method learns beside it.

All losses take logits[N, C] and labels[N], return the mean over the images, and compute in float32 or better. The value
of a loss means nothing; its gradient is what counts. Source of the experiment: SAGE, arXiv 2608.09271.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from sage_lite import advantages, checks, theory
from sage_lite.errors import Diverged, UserError

Advantage = str | Callable[..., Tensor]


def sampled_label_loss(logits: Tensor, labels: Tensor, rollouts: int, advantage: Advantage, *,
                       generator: torch.Generator | None = None) -> Tensor:
    """-mean(A log pi(sample)) over `rollouts` labels sampled for each image; reward 1 if the sample is the label.

    advantage: a name (with the registry's default parameters) or a function rewards[..., M] -> advantages[..., M].
    Raises UserError for shapes or labels that do not fit, and for logits that are not finite.
    """
    logits, labels = _checked(logits, labels)
    probs = logits.detach().softmax(-1)
    samples = torch.multinomial(probs, checks.group_size(rollouts), replacement=True, generator=generator)
    return given_samples(logits, labels, samples, advantage)


def given_samples(logits: Tensor, labels: Tensor, samples: Tensor, advantage: Advantage) -> Tensor:
    """The literal loss of sampled labels `samples[N, M]`: what `sampled_label_loss` returns after it has drawn them.

    Raises UserError as `advantages.apply` does.
    """
    rewards = (samples == labels[:, None]).to(logits.dtype)
    return -(advantages.apply(advantage, rewards) * logits.log_softmax(-1).gather(-1, samples)).mean()


def conditional_label_loss(logits: Tensor, labels: Tensor, rollouts: int, advantage: theory.Measurable, *,
                           generator: torch.Generator | None = None) -> Tensor:
    """The mean of `sampled_label_loss` over everything but the number K of right samples: one draw an image.

    Same expected gradient, less variance (Rao and Blackwell), no M samples. `advantage` may also be a
    `theory.BinaryTable`, which saves making the table at every step. Errors as in `sampled_label_loss`.
    """
    odds = log_odds(logits, labels)
    return given_successes(odds, draw_successes(odds, rollouts, generator=generator), rollouts, advantage)


def draw_successes(odds: Tensor, rollouts: int, *, generator: torch.Generator | None = None) -> Tensor:
    """K ~ Binomial(M, p) for each image, as floats of the shape of `odds`, the log-odds of p."""
    m, odds = float(checks.group_size(rollouts)), odds.detach()
    # The rarer outcome is drawn: 1 - p is 0 in float32 long before p is 1.
    rare = torch.binomial(torch.full_like(odds, m), torch.sigmoid(-odds.abs()), generator=generator)
    return torch.where(odds < 0, rare, m - rare)


def given_successes(odds: Tensor, successes: Tensor, rollouts: int, advantage: theory.Measurable) -> Tensor:
    """The conditional loss of the log-odds of p, given K right samples an image (`successes`, shape of `odds`).

    A right sample's gradient is grad log p, a wrong one's is -p / (1 - p) grad log p on average (the probabilities of
    the wrong labels sum to 1 - p). With grad log p = (1 - p) grad log(p / (1 - p)) the mean over the M samples is

        [K success[K] (1 - p) - (M - K) failure[K] p] / M  *  grad log-odds,

    for a zero-sum advantage K success[K] / M * grad log-odds, which is K success[K] / (M (1 - p)) grad log p. Nothing
    is divided by 1 - p, so p = 1 does no harm.
    """
    table = theory.binary_table(advantage, rollouts)
    success, failure = (torch.as_tensor(column).to(odds)[successes.long()] for column in table)
    p, q = torch.sigmoid(odds.detach()), torch.sigmoid(-odds.detach())
    weight = (successes * success * q - (rollouts - successes) * failure * p) / rollouts
    return -(weight * odds).mean()


def expected_label_loss(logits: Tensor, labels: Tensor, rollouts: int, advantage: theory.Measurable, *,
                        generator: torch.Generator | None = None) -> Tensor:
    """The mean of `sampled_label_loss` over all samples: p w(p) grad log p, no noise at all (`generator` is unused).

    What remains between two methods under this loss is their weighting, not their sampling.
    """
    odds = log_odds(logits, labels)
    speed = torch.as_tensor(relative_speed(advantage, torch.sigmoid(odds.detach()).cpu().double().numpy(), rollouts))
    return -(speed.to(odds) * torch.sigmoid(-odds.detach()) * odds).mean()


def relative_speed(advantage: theory.Measurable, pass_rate: ArrayLike, rollouts: int) -> ArrayLike:
    """p w(p): the expected gradient of an image as a multiple of cross-entropy's, which is 1 at every p.

    pass_rate: a number or an array in [0, 1]; the result has its shape. Errors as in `theory.prompt_weight`.
    """
    return checks.probability("pass_rate", pass_rate)[()] * theory.prompt_weight(advantage, pass_rate, rollouts)


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """log(p / (1 - p)) of each image's label, [N]: exact also where p or 1 - p is below the float's resolution.

    Raises UserError for shapes or labels that do not fit, and for logits that are not finite.
    """
    logits, labels = _checked(logits, labels)
    index = labels[:, None]
    return logits.gather(-1, index)[:, 0] - logits.scatter(-1, index, float("-inf")).logsumexp(-1)


def pass_at(odds: Tensor, k: int) -> Tensor:
    """Exact pass@k of each image, 1 - (1 - p)^k, from the log-odds of p; no sampling, so no estimator is needed."""
    return -torch.expm1(checks.group_size(k) * F.logsigmoid(-odds))


LOSSES = {"sampled": sampled_label_loss, "conditional": conditional_label_loss, "expected": expected_label_loss}


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Float logits[N, C], C >= 2, and labels[N] that point into them, or a UserError."""
    if logits.dim() != 2 or logits.shape[-1] < 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise UserError("logits must be [N, C] with at least two classes and labels [N], "
                        f"got {tuple(logits.shape)} and {tuple(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[-1]:
        raise UserError(f"labels must lie in 0..{logits.shape[-1] - 1} (the classes), got {low if low < 0 else high}")
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if not logits.detach().sum().isfinite():
        raise Diverged("the logits are not finite: the training has diverged; lower the learning rate")
    return logits, labels.long()
