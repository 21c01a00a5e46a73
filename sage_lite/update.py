"""One policy update from a batch of scored rollouts: advantages, dead groups, micro-batches, loss, optimizer step."""

from __future__ import annotations

from typing import Callable, Iterator

import torch

from sage_lite import advantages as adv
from sage_lite.logprobs import completion_logprobs
from sage_lite.losses import loss_denominator, policy_loss
from sage_lite.policy import Policy
from sage_lite.recipes import Recipe
from sage_lite.rollout import Rollouts


def group_advantages(advantage: Callable[[torch.Tensor], torch.Tensor], rewards: torch.Tensor) -> torch.Tensor:
    """Advantages of rewards [G, M] in which NaN marks a missing reward: such a rollout gets 0 and its group ignores
    it."""
    if not bool(rewards.isnan().any()):
        return advantage(rewards)
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
    micro_batch_tokens: int = 16_384,
    max_length: int | None = None,
    share_prompts: bool = True,
    skip_dead_groups: bool = True,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Train on one batch; returns what to log. Shapes: rewards, advantages [G, M]; rollouts hold G*M rows.

    The batch is cut into `minibatches` (an optimizer step each) and these into micro-batches, whose gradients add up to
    exactly the minibatch's. A group without advantage gives no policy gradient, so with beta = 0 it is not computed,
    while its tokens stay in the denominator. If nothing is left to learn from, the optimizer does not step: neither
    momentum nor weight decay may move a model that saw no signal.
    """
    group_size, device = rollouts.group_size, policy.device
    mask = rollouts.mask & ~rewards.isnan().reshape(-1, 1).to(device)
    dead = (advantages == 0).all(-1)
    counted = ~dead if recipe.drop_dead_groups else torch.ones_like(dead)
    computed = counted & ~dead if (beta == 0.0 and skip_dead_groups) else counted
    common = dict(pad_id=policy.pad_id, temperature=temperature, share_prompts=share_prompts)
    totals: dict[str, float] = {"loss": 0.0, "clip_share": 0.0, "kl": 0.0, "grad_norm": 0.0, "ratio_max": 1.0}
    order = torch.randperm(len(dead), generator=generator) if minibatches > 1 else torch.arange(len(dead))
    rows_of = torch.arange(len(dead) * group_size).view(-1, group_size)
    widths = mask.view(-1, group_size, mask.shape[1]).sum(-1).amax(-1).cpu()
    prompt_widths = torch.tensor([len(p) for p in rollouts.prompts])
    lengths = torch.stack([torch.full_like(widths, group_size), widths + prompt_widths], 1)

    def logprobs(groups: torch.Tensor, model) -> torch.Tensor:
        rows = rows_of[groups].reshape(-1).to(device)
        return completion_logprobs(
            model, rollouts.prompts, rollouts.completions[rows], mask[rows], rollouts.group[rows], **common
        )

    old: dict[int, torch.Tensor] = {}
    if minibatches > 1:
        with torch.no_grad():  # before the first of several steps moves the policy
            for micro in micro_batches(lengths, micro_batch_tokens):
                for g, value in zip(micro.tolist(), logprobs(micro, policy.causal_lm).split(group_size)):
                    old[g] = value
    steps = 0
    for batch in order.chunk(minibatches):
        counted_rows = rows_of[batch[counted[batch]]].reshape(-1).to(device)
        live = batch[computed[batch]]
        if len(live) == 0:
            continue
        denominator = loss_denominator(mask[counted_rows], recipe.normalization, max_length)
        live_tokens = max(float(mask[rows_of[live].reshape(-1).to(device)].sum()), 1.0)
        optimizer.zero_grad(set_to_none=True)
        for micro in micro_batches(lengths[live], micro_batch_tokens):
            groups = live[micro]
            rows = rows_of[groups].reshape(-1).to(device)
            logp = logprobs(groups, policy.causal_lm)
            ref = None
            if beta > 0.0:
                with policy.reference() as reference:
                    ref = logprobs(groups, reference)
            loss, stats = policy_loss(
                logp, torch.cat([old[g] for g in groups.tolist()]) if old else logp.detach(),
                advantages[groups].reshape(-1).to(device), mask[rows],
                clip_low=recipe.clip_low, clip_high=recipe.clip_high, kind=recipe.kind,
                normalization=recipe.normalization, beta=beta, ref_logprobs=ref, denominator=denominator,
            )  # fmt: skip
            loss.backward()
            share = float(mask[rows].sum()) / live_tokens
            totals["loss"] += loss.item()
            totals["clip_share"] += stats["clip_share"] * share
            totals["kl"] += stats.get("kl", 0.0) * share
            totals["ratio_max"] = max(totals["ratio_max"], stats["ratio_max"])
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in policy.trainable()], grad_clip or float("inf"))
        optimizer.step()
        totals["grad_norm"] += float(norm)
        steps += 1
    averaged = {k: v if k == "ratio_max" else v / max(steps, 1) for k, v in totals.items()}
    return averaged | {"optimizer_steps": steps}
