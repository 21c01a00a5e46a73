"""The policy-gradient loss of a batch of rollouts: clipped surrogate, k3 KL, token normalisations, chunked logprobs."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from sage_lite.checks import number, whole
from sage_lite.errors import UserError

NORMALIZATIONS = ("token", "sequence", "constant")
KINDS = ("clip", "cispo")
MAX_LOG_RATIO = 20.0  # e^20: far outside any clip range, and still finite with a finite gradient in float32


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference): `e^d - d - 1` with `d = ref_logprobs - logprobs`; never negative.

    Shapes: any two equal shapes, the same shape back; nats. `d` is clamped to ±20 *before* the exponential: clamping
    after it would leave an infinite gradient behind. Raises UserError for shapes that differ. Source: Schulman,
    "Approximating KL divergence" (k3).
    """
    if logprobs.shape != ref_logprobs.shape:
        raise UserError(
            f"logprobs {tuple(logprobs.shape)} and ref_logprobs {tuple(ref_logprobs.shape)} must have one shape"
        )
    d = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(d) - 1 would lose for the small d of an early step.
    return torch.expm1(d) - d


def loss_denominator(mask: torch.Tensor, normalization: str = "token", max_length: int | None = None) -> float:
    """What the summed token losses of a *whole* batch are divided by.

    `mask` [N, T] marks the live completion tokens. "token": their number (DAPO, SAGE); "sequence": the number of
    rollouts, each first averaged over its own length (GRPO); "constant": that number times max_length (Dr.GRPO). A
    rollout without a live token (its grader failed) is in neither numerator nor denominator. Micro-batches must all use
    the number of the whole batch; the mean of their own means is a different loss.
    """
    live = mask.bool()
    if normalization == "token":
        return max(float(live.sum()), 1.0)
    rollouts = max(float(live.any(-1).sum()), 1.0)
    if normalization == "sequence":
        return rollouts
    if normalization == "constant":
        if not max_length or max_length < 1:
            raise UserError(f"normalization='constant' needs max_length >= 1, got {max_length!r}")
        return rollouts * max_length
    raise UserError(f"unknown normalization {normalization!r}; choose one of {', '.join(NORMALIZATIONS)}")


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    normalization: str = "token",
    kind: str = "clip",
    beta: float = 0.0,
    ref_logprobs: torch.Tensor | None = None,
    max_length: int | None = None,
    denominator: float | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The scalar to minimise, `-sum_t [surrogate - beta * KL] / denominator`, and what to log about it.

    Shapes: logprobs, old_logprobs, ref_logprobs, mask [N, T]; advantages [N], one per rollout. The ratio is
    `rho = exp(logprobs - old_logprobs)`; at the first step on fresh rollouts it is 1 everywhere, so the loss *value* is
    just minus the mean advantage while its gradient is not zero.

    kind "clip": `min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)` (PPO; DAPO widens clip_high to .28).
    kind "cispo": `stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) * A * logprobs` (MiniMax-M1, arXiv 2506.13585).
    clip_low and clip_high are always distances from 1. With no live token, loss and gradient are 0.
    denominator: `loss_denominator` of the whole batch, where this is a micro-batch of it; otherwise computed here.
    stats: "clip_share" and "kl" are means over live tokens, "ratio_max" is the largest live ratio.
    Raises UserError for unknown names, shapes that differ, negative clips, a beta without ref_logprobs, or an advantage
    that is not finite on a rollout with a live token.
    """
    _check(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, normalization, kind, beta, ref_logprobs)
    if denominator is None:
        denominator = loss_denominator(mask, normalization, max_length)
    denominator = number("denominator", denominator, above=0.0)
    live = mask.bool()
    dtype = torch.promote_types(logprobs.dtype, torch.float32)  # float32 at least; float64 stays
    # Dead positions may hold -inf or NaN: overwrite them before any arithmetic, since 0 * NaN is NaN in the backward.
    logp = torch.where(live, logprobs, torch.zeros_like(logprobs)).to(dtype)
    old = torch.where(live, old_logprobs.detach(), torch.zeros_like(old_logprobs)).to(dtype)
    a = torch.where(live, advantages.detach().to(dtype).unsqueeze(-1), 0.0)

    ratio = torch.exp((logp - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    if kind == "clip":
        surrogate = torch.minimum(ratio * a, bounded * a)
        clipped = ratio * a > bounded * a  # the min picked the constant: this token gives no gradient
    else:
        surrogate = bounded.detach() * a * logp
        clipped = ratio != bounded
    weight = live.to(dtype)
    if normalization == "sequence":
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1.0)
    tokens = max(float(live.sum()), 1.0)
    stats = {"clip_share": float((clipped & live).sum()) / tokens, "ratio_max": _masked_max(ratio, live)}
    per_token = surrogate
    if beta > 0.0:
        ref = torch.where(live, ref_logprobs.detach(), torch.zeros_like(ref_logprobs)).to(dtype)
        kl = kl_k3(logp, ref)
        per_token = per_token - beta * kl
        stats["kl"] = float((kl.detach() * live).sum()) / tokens
    loss = -(per_token * weight).sum() / denominator
    return loss, stats


def chunked_logprobs(
    hidden: torch.Tensor,
    lm_head: torch.nn.Module,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> torch.Tensor:
    """Log-probability of each target token, never holding the logits of more than `chunk` tokens.

    Shapes: hidden [n, d], targets [n] -> [n], float32. Each chunk's logits are recomputed in the backward pass, so
    memory is `chunk * vocabulary` and not `n * vocabulary`. `temperature` is the sampling temperature: leave it out and
    rho is not 1 on the first step. Raises UserError for other shapes, a temperature that is not positive, or a chunk
    that is no whole number of at least 1.
    """
    temperature = number("temperature", temperature, above=0.0)
    chunk = whole("chunk", chunk, 1)
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise UserError(
            f"hidden {tuple(hidden.shape)} must be [tokens, width] and targets {tuple(targets.shape)} [tokens]: "
            "one target for each hidden state"
        )

    def one(h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logits = lm_head(h).float() / temperature
        return logits.gather(-1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)

    if hidden.shape[0] <= chunk:
        return one(hidden, targets)
    recompute = torch.is_grad_enabled()
    pieces = [
        checkpoint(one, h, t, use_reentrant=False) if recompute else one(h, t)
        for h, t in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.cat(pieces)


def _masked_max(x: torch.Tensor, live: torch.Tensor) -> float:
    return float(x.detach()[live].max()) if bool(live.any()) else 1.0


def _check(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, normalization, kind, beta, ref_logprobs):
    if kind not in KINDS:
        raise UserError(f"unknown loss kind {kind!r}; choose one of {', '.join(KINDS)}")
    if normalization not in NORMALIZATIONS:  # also where the denominator is given: no silent fall-back
        raise UserError(f"unknown normalization {normalization!r}; choose one of {', '.join(NORMALIZATIONS)}")
    if not (clip_low >= 0 and clip_high >= 0):
        raise UserError(f"clip_low and clip_high are distances from 1 and must be >= 0, got {clip_low} and {clip_high}")
    if logprobs.dim() != 2 or logprobs.shape != mask.shape or logprobs.shape != old_logprobs.shape:
        raise UserError(
            f"logprobs {tuple(logprobs.shape)}, old_logprobs {tuple(old_logprobs.shape)} and mask {tuple(mask.shape)} "
            "must have one shape [rollouts, tokens]"
        )
    if advantages.shape != logprobs.shape[:1]:
        raise UserError(f"advantages must be [{logprobs.shape[0]}], one per rollout, got {tuple(advantages.shape)}")
    bad = ~advantages.isfinite() & mask.bool().any(-1)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise UserError(
            f"advantages must be finite where a rollout has a live token, got {advantages[i].item()} at index {i}: "
            "mask the rollouts out whose grader failed"
        )
    if not beta >= 0 or (beta > 0 and ref_logprobs is None):
        raise UserError(f"beta={beta} needs to be >= 0, and ref_logprobs when it is above 0")
    if ref_logprobs is not None and ref_logprobs.shape != logprobs.shape:
        raise UserError(
            f"ref_logprobs {tuple(ref_logprobs.shape)} must have the shape of logprobs {tuple(logprobs.shape)}"
        )
