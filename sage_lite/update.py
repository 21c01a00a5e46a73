"""One policy update from a batch of scored rollouts: advantages, dead groups, micro-batches, loss, optimizer step."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Iterator

import torch

from sage_lite import advantages as adv
from sage_lite.logprobs import completion_logprobs, recomputed_activations
from sage_lite.losses import loss_denominator, policy_loss
from sage_lite.oom import Limit
from sage_lite.policy import Policy
from sage_lite.recipes import Recipe
from sage_lite.rollout import Rollouts


def group_advantages(advantage: Callable[[torch.Tensor], torch.Tensor], rewards: torch.Tensor) -> torch.Tensor:
    """Advantages of rewards [G, M] in which NaN marks a missing reward: such a rollout gets 0 and its group ignores
    it. Raises UserError for an advantage of another shape or one that is not finite."""
    if not bool(rewards.isnan().any()):
        return adv.apply(advantage, rewards)
    ids = torch.arange(rewards.shape[0]).repeat_interleave(rewards.shape[1])
    flat = adv.grouped(advantage, rewards.reshape(-1), ids, nan_is_missing=True, group_size=rewards.shape[1])
    return flat.view_as(rewards)


def dead_groups(rewards: torch.Tensor) -> torch.Tensor:
    """Which groups of rewards [G, M] are degenerate: all rewards equal, missing ones aside. -> [G] bool."""
    low, high = rewards.nan_to_num(nan=float("inf")).amin(-1), rewards.nan_to_num(nan=float("-inf")).amax(-1)
    return low >= high


def micro_batches(lengths: torch.Tensor, most_tokens: int) -> Iterator[torch.Tensor]:
    """Split groups into micro-batches of at most `most_tokens` tokens (padding included), longest first.

    lengths: [G, 2], tokens of a group that grow with its widest member: (rollouts, width). Yields index tensors; a
    group that alone passes the limit is a micro-batch of its own.
    """
    order = torch.argsort(lengths[:, 1], descending=True)
    start = 0
    while start < len(order):
        width, rows, end = int(lengths[order[start], 1]), 0, start
        while end < len(order) and (end == start or (rows + int(lengths[order[end], 0])) * width <= most_tokens):
            rows += int(lengths[order[end], 0])
            end += 1
        yield order[start:end]
        start = end


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    recipe: Recipe,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    grad_clip: float = 1.0,
    minibatches: int = 1,
    micro_batch_tokens: int | Limit = 16_384,
    logits_chunk: int = 1024,
    max_length: int | None = None,
    share_prompts: bool = True,
    skip_dead_groups: bool = True,
    gradient_checkpointing: bool = False,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Train on one batch; returns what to log. Shapes: rewards, advantages [G, M]; rollouts hold G*M rows.

    The batch is cut into `minibatches` (an optimizer step each) and these into micro-batches, whose gradients add up to
    exactly the minibatch's. A group without advantage gives no policy gradient, so with beta = 0 it is not computed,
    while its tokens stay in the denominator. If nothing is left to learn from, the optimizer does not step: neither
    momentum nor weight decay may move a model that saw no signal. Nor does it step on a gradient that is not finite.

    gradient_checkpointing: as in `logprobs.recomputed_activations`; it takes the plain path, without shared prompts.
    If memory runs out, the minibatch's gradient is thrown away whole and computed again with half as many
    micro_batch_tokens, so no part of it counts twice.
    """
    group_size, device = rollouts.group_size, policy.device
    limit = micro_batch_tokens
    if not isinstance(limit, Limit):
        limit = Limit("micro_batch_tokens", limit)
    mask = rollouts.mask & ~rewards.isnan().reshape(-1, 1).to(device)
    dead = (advantages == 0).all(-1)
    counted = ~dead if recipe.drop_dead_groups else torch.ones_like(dead)
    computed = counted & ~dead if (beta == 0.0 and skip_dead_groups) else counted
    common = dict(
        pad_id=policy.pad_id, temperature=temperature, share_prompts=share_prompts and not gradient_checkpointing,
        chunk=logits_chunk,
    )  # fmt: skip
    order = torch.randperm(len(dead), generator=generator) if minibatches > 1 else torch.arange(len(dead))
    rows_of = torch.arange(len(dead) * group_size).view(-1, group_size)
    widths = mask.view(-1, group_size, mask.shape[1]).sum(-1).amax(-1).cpu()
    prompt_widths = torch.tensor([len(p) for p in rollouts.prompts])
    lengths = torch.stack([torch.full_like(widths, group_size), widths + prompt_widths], 1)
    values = advantages.reshape(-1).to(device)

    def pieces(groups: torch.Tensor, most_tokens: int) -> Iterator[torch.Tensor]:
        """The rows of each micro-batch: whole groups, or parts of one that alone passes the limit."""
        for micro in micro_batches(lengths[groups], most_tokens):
            rows = rows_of[groups[micro]].reshape(-1).to(device)
            width = int(lengths[groups[micro[0]], 1])
            yield from rows.split(max(1, most_tokens // width)) if len(micro) == 1 else [rows]

    def logprobs(rows: torch.Tensor, model) -> torch.Tensor:
        return completion_logprobs(
            model, rollouts.prompts, rollouts.completions[rows], mask[rows], rollouts.group[rows], **common
        )

    def before(most_tokens: int) -> torch.Tensor:
        found = torch.zeros(mask.shape, device=device)
        for rows in pieces(computed.nonzero()[:, 0], most_tokens):
            found[rows] = logprobs(rows, policy.causal_lm)
        return found

    def accumulate(live: torch.Tensor, denominator: float, scale: float, most_tokens: int) -> dict[str, float]:
        """Leave the minibatch's gradient, times `scale`, in the parameters, whatever they held before."""
        optimizer.zero_grad(set_to_none=True)
        found = {"loss": 0.0, "clip_share": 0.0, "kl": 0.0, "ratio_max": 1.0}
        live_tokens = max(float(mask[rows_of[live].reshape(-1).to(device)].sum()), 1.0)
        for rows in pieces(live, most_tokens):
            ref = None
            if beta > 0.0:
                with policy.reference() as reference:
                    ref = logprobs(rows, reference)
            logp = logprobs(rows, policy.causal_lm)
            loss, stats = policy_loss(
                logp, logp.detach() if old is None else old[rows], values[rows], mask[rows],
                clip_low=recipe.clip_low, clip_high=recipe.clip_high, kind=recipe.kind,
                normalization=recipe.normalization, beta=beta, ref_logprobs=ref, denominator=denominator,
            )  # fmt: skip
            (loss * scale).backward()
            share = float(mask[rows].sum()) / live_tokens
            found["loss"] += loss.item()
            found["clip_share"] += stats["clip_share"] * share
            found["kl"] += stats.get("kl", 0.0) * share
            found["ratio_max"] = max(found["ratio_max"], stats["ratio_max"])
        return found

    def within_memory(work: Callable[[int], Any], groups: torch.Tensor) -> Any:
        sizes = lengths[groups]
        return limit.run(work, whole=int(sizes[:, 0].sum() * sizes[:, 1].max()), least=int(sizes[:, 1].max()))

    old = None
    if minibatches > 1 and bool(computed.any()):
        with torch.no_grad():  # before the first of several steps moves the policy
            old = within_memory(before, computed.nonzero()[:, 0])
    totals = {"loss": 0.0, "clip_share": 0.0, "kl": 0.0, "grad_norm": 0.0, "ratio_max": 1.0}
    steps = skipped = 0
    for batch in torch.tensor_split(order, minibatches):
        live = batch[computed[batch]]
        if len(live) == 0:
            continue
        counted_rows = rows_of[batch[counted[batch]]].reshape(-1).to(device)
        denominator = loss_denominator(mask[counted_rows], recipe.normalization, max_length)
        scale = policy.gradient_scale(denominator)
        with recomputed_activations(policy.causal_lm) if gradient_checkpointing else contextlib.nullcontext():
            found = within_memory(lambda most: accumulate(live, denominator, scale, most), live)
        parameters = [p for _, p in policy.trainable()]
        if scale != 1.0:
            torch._foreach_div_([p.grad for p in parameters if p.grad is not None], scale)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, grad_clip or float("inf")))
        if math.isfinite(norm):
            optimizer.step()
            steps += 1
            found["grad_norm"] = norm
        else:
            skipped += 1
            policy.gradient_overflowed()
        for name, value in found.items():
            totals[name] = max(totals[name], value) if name == "ratio_max" else totals[name] + value
    averaged = {k: v if k == "ratio_max" else v / max(steps + skipped, 1) for k, v in totals.items()}
    return averaged | {"optimizer_steps": steps, "skipped_steps": skipped}
