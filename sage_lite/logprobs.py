"""Log-probabilities of sampled completions: prompts computed once a group, identical rollouts once, logits in
chunks."""

from __future__ import annotations

import torch

from sage_lite.losses import chunked_logprobs


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
    back = None
    if share_prompts:
        rows, back = torch.unique(
            torch.cat([group[:, None], live.sum(-1, keepdim=True), tokens], 1), dim=0, return_inverse=True
        )
        group, tokens = rows[:, 0], rows[:, 2:]
        live = torch.arange(width, device=tokens.device) < rows[:, 1:2]
    hidden = (_hidden_shared if share_prompts else _hidden_plain)(causal_lm, prompts, tokens, live, group, pad_id)
    flat = chunked_logprobs(
        hidden[live], causal_lm.get_output_embeddings(), tokens[live], temperature=temperature, chunk=chunk
    )
    out = torch.zeros(live.shape, dtype=torch.float32, device=tokens.device).masked_scatter(live, flat)
    out = out if back is None else out[back]
    return torch.nn.functional.pad(out, (0, completions.shape[1] - width))


def _hidden_shared(causal_lm, prompts, tokens, live, group, pad_id) -> torch.Tensor:
    """[n, T, d]: the hidden state that predicts each completion token, prompts computed once."""
    decoder = causal_lm.get_decoder()
    used, group = torch.unique(group, return_inverse=True)
    ids, prompt_mask = left_pad([prompts[i] for i in used.tolist()], pad_id, tokens.device)
    out = decoder(input_ids=ids, attention_mask=prompt_mask, position_ids=positions(prompt_mask), use_cache=True)
    first = out.last_hidden_state[group, -1:]
    if tokens.shape[1] == 1:
        return first
    cache = out.past_key_values
    cache.batch_select_indices(group)
    full = torch.cat([prompt_mask[group], live[:, :-1].to(prompt_mask.dtype)], 1)
    rest = decoder(
        input_ids=tokens[:, :-1],
        attention_mask=full,
        past_key_values=cache,
        use_cache=True,
        position_ids=positions(full)[:, ids.shape[1] :],
    )
    return torch.cat([first, rest.last_hidden_state], 1)


def _hidden_plain(causal_lm, prompts, tokens, live, group, pad_id) -> torch.Tensor:
    """[n, T, d]: the same, one whole row (prompt and completion) per rollout."""
    ids, prompt_mask = left_pad([prompts[i] for i in group.tolist()], pad_id, tokens.device)
    full = torch.cat([prompt_mask, live.to(prompt_mask.dtype)], 1)
    out = causal_lm.get_decoder()(
        input_ids=torch.cat([ids, tokens], 1), attention_mask=full, position_ids=positions(full), use_cache=False
    )
    return out.last_hidden_state[:, ids.shape[1] - 1 : -1]
