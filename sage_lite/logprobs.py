"""Log-probabilities of sampled completions: prompts computed once a group, identical rollouts once, logits in
chunks."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch

from sage_lite.errors import UserError
from sage_lite.kvcache import select_rows, share
from sage_lite.losses import chunked_logprobs

WORTH = 512  # padding tokens: about what one more pass through the decoder costs, on a CPU as on a GPU


def left_pad(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-id lists -> (ids, mask), both [G, P], padded on the left so that every prompt ends at the last column."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Position of each token among the live ones of its row: without it, left padding shifts every position."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def completion_logprobs(
    causal_lm: torch.nn.Module,
    prompts: list[list[int]],
    completions: torch.Tensor,
    mask: torch.Tensor,
    group: torch.Tensor,
    *,
    pad_id: int,
    temperature: float = 1.0,
    share_prompts: bool = True,
    chunk: int = 1024,
) -> torch.Tensor:
    """Log-probability of each completion token under `causal_lm` at the sampling temperature; 0 where the mask is 0.

    Shapes: prompts G lists of ids; completions, mask [N, T] (right-padded, EOS live); group [N] the prompt of each row;
    returns [N, T] float32. With gradient when gradients are on.

    share_prompts: compute each prompt's keys and values once, with gradient, and let its completions attend to them;
    equal rollouts of a group are computed once and read many times. Both are exact. False is the plain way, a whole row
    per rollout: gradient checkpointing needs it, since it drops the key-value cache.
    """
    mask = mask.bool()
    width = max(int(mask.sum(-1).max()) if mask.numel() else 0, 1)
    tokens, live = completions[:, :width], mask[:, :width]
    tokens = torch.where(live, tokens, torch.full_like(tokens, pad_id))
    head, out = causal_lm.get_output_embeddings(), torch.zeros(live.shape, device=tokens.device)
    if not share_prompts:
        hidden = _hidden_plain(causal_lm, prompts, tokens, live, group, pad_id)
        flat = chunked_logprobs(hidden[live], head, tokens[live], temperature=temperature, chunk=chunk)
        return torch.nn.functional.pad(out.masked_scatter(live, flat), (0, completions.shape[1] - width))
    keys = torch.cat([group[:, None], live.sum(-1, keepdim=True), tokens], 1)
    rows, back = torch.unique(keys, dim=0, return_inverse=True)
    group, lengths, tokens = rows[:, 0], rows[:, 1], rows[:, 2:]
    hidden, live = _hidden_shared(causal_lm, prompts, tokens, lengths, group, pad_id)
    flat = chunked_logprobs(hidden, head, tokens[live], temperature=temperature, chunk=chunk)
    out = torch.zeros(live.shape, device=tokens.device).masked_scatter(live, flat)[back]
    return torch.nn.functional.pad(out, (0, completions.shape[1] - width))


def length_buckets(lengths: torch.Tensor, worth: int = WORTH) -> list[torch.Tensor]:
    """Indices of rows of like length, longest first: a cut is made where it saves at least `worth` padding tokens."""
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered, cuts, width = lengths[order].tolist(), [0], None
    for i, length in enumerate(ordered):
        width = length if width is None else width
        if (width - length) * (len(ordered) - i) >= worth:
            cuts.append(i)
            width = length
    return [order[a:b] for a, b in zip(cuts, [*cuts[1:], len(ordered)])]


def _hidden_shared(causal_lm, prompts, tokens, lengths, group, pad_id) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states [n, d] that predict the live completion tokens, and which those are, [N, T]; prompts once."""
    decoder = causal_lm.get_decoder()
    used, group = torch.unique(group, return_inverse=True)
    ids, prompt_mask = left_pad([prompts[i] for i in used.tolist()], pad_id, tokens.device)
    out = decoder(input_ids=ids, attention_mask=prompt_mask, position_ids=positions(prompt_mask), use_cache=True)
    live = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    pieces, where = [], []
    for rows in length_buckets(lengths):
        width = max(int(lengths[rows[0]]), 1)  # rollouts without a reward have no live token
        hidden = out.last_hidden_state[group[rows], -1:]
        if width > 1:
            cache = select_rows(share(out.past_key_values), group[rows])
            full = torch.cat([prompt_mask[group[rows]], live[rows, : width - 1].to(prompt_mask.dtype)], 1)
            rest = decoder(
                input_ids=tokens[rows, : width - 1], attention_mask=full, past_key_values=cache, use_cache=True,
                position_ids=positions(full)[:, ids.shape[1] :],
            )  # fmt: skip
            hidden = torch.cat([hidden, rest.last_hidden_state], 1)
        keep = live[rows, :width]
        pieces.append(hidden[keep[:, : hidden.shape[1]]])
        where.append(rows[:, None].expand_as(keep)[keep] * tokens.shape[1] + keep.nonzero()[:, 1])
    order = torch.argsort(torch.cat(where))  # back into the order of tokens[live]
    return torch.cat(pieces)[order], live


def _hidden_plain(causal_lm, prompts, tokens, live, group, pad_id) -> torch.Tensor:
    """[n, T, d]: the same, one whole row (prompt and completion) per rollout."""
    ids, prompt_mask = left_pad([prompts[i] for i in group.tolist()], pad_id, tokens.device)
    full = torch.cat([prompt_mask, live.to(prompt_mask.dtype)], 1)
    out = causal_lm.get_decoder()(
        input_ids=torch.cat([ids, tokens], 1), attention_mask=full, position_ids=positions(full), use_cache=False
    )
    return out.last_hidden_state[:, ids.shape[1] - 1 : -1]


@contextlib.contextmanager
def recomputed_activations(causal_lm: torch.nn.Module) -> Iterator[None]:
    """Gradient checkpointing for forward and backward passes inside: each layer keeps its input and is computed again.

    transformers checkpoints a layer only while its `training` is set, and a policy stays in evaluation mode, where
    dropout is off and rho is 1 on fresh rollouts. So that flag alone is set, on the checkpointed layers and not on the
    modules inside them; a model whose configuration asks for dropout is refused, since a layer might apply it itself.
    Not reentrant: with frozen inputs, as under LoRA, the reentrant kind gives no gradient at all.
    """
    config = causal_lm.config.to_dict()
    dropout = {k: v for k, v in config.items() if ("dropout" in k or k.endswith("pdrop")) and v}
    if dropout:
        name, value = next(iter(dropout.items()))
        raise UserError(
            f"gradient_checkpointing needs a model without dropout, and this one has {name}={value}: "
            "set it to 0 in the model's config.json, or leave gradient_checkpointing off"
        )
    if not getattr(causal_lm, "supports_gradient_checkpointing", False):
        raise UserError(f"{type(causal_lm).__name__} does not support gradient_checkpointing: leave it off")
    causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in causal_lm.modules() if getattr(m, "gradient_checkpointing", False)]
    before = [m.training for m in layers]
    for m in layers:
        m.training = True
    try:
        yield
    finally:
        for m, training in zip(layers, before):
            m.training = training
        causal_lm.gradient_checkpointing_disable()
