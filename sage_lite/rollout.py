"""Sample M completions a prompt. A group is a tree: rollouts that share a prefix share its computation until they
part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sage_lite.errors import Diverged, UserError
from sage_lite.kvcache import select_rows
from sage_lite.logprobs import left_pad, positions
from sage_lite.oom import Limit
from sage_lite.policy import Policy

KEYS = 24 * 2**20  # bytes of one layer's keys on a CPU; see rows_at_once
LOGITS = 2**25  # most logits held at a time, 128 MiB in float32: with 152k tokens in a vocabulary, those of 220 rows


@dataclass
class Rollouts:
    """The sampled completions of G prompts, M each; row i belongs to prompt i // group_size.

    prompts: G token-id lists. completions, mask: [G*M, T], right-padded, live up to and including the first EOS.
    finished: [G*M], whether an EOS was reached before the length limit. texts: G*M strings without the EOS.
    """

    prompts: list[list[int]]
    completions: torch.Tensor
    mask: torch.Tensor
    finished: torch.Tensor
    texts: list[str]
    group_size: int

    @property
    def group(self) -> torch.Tensor:
        """The prompt index of each row, [G*M]."""
        return torch.arange(len(self.texts), device=self.completions.device) // self.group_size


def completion_mask(tokens: torch.Tensor, eos_token_id: int | list[int]) -> torch.Tensor:
    """True up to and including the first EOS of each row, also where pad = EOS; all True where there is none (cut off).

    Shapes: tokens [..., T] integer ids -> [..., T] bool.
    """
    eos = torch.as_tensor(eos_token_id, device=tokens.device).reshape(-1)
    is_eos = torch.isin(tokens, eos)
    return (is_eos.cumsum(-1) - is_eos.long()) == 0


def rows_at_once(model_config: Any, tokens: int, device: torch.device) -> int | None:
    """How many rollouts of up to `tokens` tokens, prompt included, to sample together; None for no limit, on a GPU.

    A CPU gains nothing from large batches. But keys and values grow into new memory with every token, and blocks of
    more than 32 MiB Linux's allocator takes from the system and gives back each time, which then is most of the work.
    """
    if device.type != "cpu":
        return None
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return max(1, KEYS // (4 * heads * head_dim * tokens))


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: list[list[int]],
    group_size: int,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    rollout_batch: int | Limit | None = None,
) -> Rollouts:
    """Draw `group_size` independent completions of every prompt; temperature 0 takes the likeliest token (greedy).

    Each prompt is computed once. Then every step computes one row per *distinct* prefix, not per rollout: rollouts that
    have drawn the same tokens so far share a row, and finished ones leave. The samples are the same as with a row each.
    generator: the source of randomness, on the policy's device. rollout_batch: most rollouts at a time; those of
    prompts of like length come together, so that little is padded, and the results are in the order of the prompts. If
    memory runs out, it is halved (`sage_lite.oom`). Raises UserError for empty prompts or bad settings, Diverged for
    probabilities that are not finite.
    """
    _check(policy, prompts, group_size, max_new_tokens, temperature, top_p)
    rows, device = len(prompts) * group_size, policy.device
    limit = rollout_batch if isinstance(rollout_batch, Limit) else Limit("rollout_batch", rollout_batch or rows)
    owner = torch.arange(rows) // group_size
    by_length = torch.argsort(torch.tensor([len(p) for p in prompts])[owner], stable=True)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "generator": generator}
    tokens = torch.full((rows, max_new_tokens), policy.pad_id, device=device)
    length = torch.zeros(rows, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    start = 0
    while start < rows:
        state = None if generator is None else generator.get_state()

        def draw(most: int):
            if state is not None:
                generator.set_state(state)
            part = (torch.arange(rows) if most >= rows else by_length)[start : start + most]
            used, row = torch.unique(owner[part], return_inverse=True)
            return part, _sample([prompts[i] for i in used.tolist()], row.to(device), policy, **settings)

        part, drawn = limit.run(draw, whole=rows - start)
        start += len(part)
        part = part.to(device)
        tokens[part], length[part], finished[part] = drawn
    width = int(length.max())
    tokens, live = tokens[:, :width], torch.arange(width, device=device) < length[:, None]
    return Rollouts(prompts, tokens, live, finished, policy.decode(tokens, live), group_size)


def _sample(
    prompts: list[list[int]], row: torch.Tensor, policy: Policy, *, max_new_tokens: int, temperature: float,
    top_p: float, generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """One batch: rollout i of R continues prompt row[i]. -> tokens [R, max_new_tokens], length [R], finished [R]."""
    lm, device, rollouts = policy.causal_lm, policy.device, len(row)
    decoder, head, vocabulary = lm.get_decoder(), lm.get_output_embeddings(), lm.config.get_text_config().vocab_size
    ids, mask = left_pad(prompts, policy.pad_id, device)
    out = decoder(input_ids=ids, attention_mask=mask, position_ids=positions(mask), use_cache=True)
    hidden, cache, position = out.last_hidden_state[:, -1], out.past_key_values, mask.sum(-1, keepdim=True)
    del out

    tokens = torch.full((rollouts, max_new_tokens), policy.pad_id, device=device)
    length = torch.full((rollouts,), max_new_tokens, device=device)
    finished = torch.zeros(rollouts, dtype=torch.bool, device=device)
    eos = torch.tensor(policy.eos_ids, device=device)
    alive = torch.arange(rollouts, device=device)  # rollout alive[i] reads the computed row[i]
    for step in range(max_new_tokens):
        drawn = _next_tokens(hidden, head, row, max(1, LOGITS // vocabulary), temperature, top_p, generator)
        tokens[alive, step] = drawn
        ended = torch.isin(drawn, eos)
        length[alive[ended]] = step + 1
        finished[alive[ended]] = True
        alive, row, drawn = alive[~ended], row[~ended], drawn[~ended]
        if len(alive) == 0 or step == max_new_tokens - 1:
            break
        child, new_row = torch.unique(row * vocabulary + drawn, return_inverse=True)
        parent, token = child // vocabulary, child % vocabulary
        if len(parent) != len(position) or not torch.equal(parent, torch.arange(len(parent), device=device)):
            cache = select_rows(cache, parent)
            mask, position = mask[parent], position[parent]
        row, mask = new_row, torch.cat([mask, torch.ones_like(position)], 1)
        out = decoder(
            input_ids=token[:, None], attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        )
        hidden, cache, position = out.last_hidden_state[:, -1], out.past_key_values, position + 1
        del out
    return tokens, length, finished


def _next_tokens(hidden, head, row, most: int, temperature: float, top_p: float, generator) -> torch.Tensor:
    """The next token of each rollout, [R], with the logits of at most `most` rows at a time."""
    if len(hidden) <= most:
        return _draw(head(hidden).float(), row, temperature, top_p, generator, most)
    drawn = torch.empty_like(row)
    for start in range(0, len(hidden), most):
        mine = (row >= start) & (row < start + most)
        logits = head(hidden[start : start + most]).float()
        drawn[mine] = _draw(logits, row[mine] - start, temperature, top_p, generator, most)
    return drawn


def _draw(
    logits: torch.Tensor, row: torch.Tensor, temperature: float, top_p: float, generator, most: int = 2**31
) -> torch.Tensor:
    """One token for each rollout from the distribution of the row it reads: logits [n, V], row [R] -> [R]."""
    if temperature == 0:
        likeliest = logits.argmax(-1)  # NaN counts as the largest
        _refuse_broken(logits.gather(-1, likeliest[:, None]))
        return likeliest[row]
    probs = torch.softmax(logits / temperature, -1)
    _refuse_broken(probs[:, 0])  # one NaN or infinity among the logits makes a whole row NaN
    if top_p < 1.0:
        ordered, index = probs.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p stays in
        probs = probs.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), 0.0)
    return torch.cat([torch.multinomial(probs[r], 1, generator=generator).squeeze(-1) for r in row.split(most)])


def _refuse_broken(values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise Diverged(
            "the model's probabilities are not finite: its weights are damaged, or its numbers too large for their "
            "dtype; go back to an earlier checkpoint with a lower lr, or take dtype='float32'"
        )


def _check(policy, prompts, group_size, max_new_tokens, temperature, top_p) -> None:
    if isinstance(prompts, str) or any(isinstance(p, str) for p in prompts):
        raise UserError(f"prompts must be lists of token ids, got text {prompts!r:.80}: use policy.encode([...])")
    if not prompts or min(len(p) for p in prompts) == 0:
        raise UserError("there is nothing to sample from: no prompt, or a prompt without a token")
    if group_size < 1 or max_new_tokens < 1:
        raise UserError(f"group_size and max_new_tokens must be >= 1, got {group_size} and {max_new_tokens}")
    if temperature < 0 or not 0 < top_p <= 1:
        raise UserError(f"temperature must be >= 0 and top_p in (0, 1], got {temperature} and {top_p}")
    longest = max(len(p) for p in prompts)
    if longest + max_new_tokens > policy.context_length:
        raise UserError(
            f"the longest prompt has {longest} tokens; with max_new_tokens={max_new_tokens} that passes "
            f"the model's context of {policy.context_length}: shorten the prompts or lower max_new_tokens"
        )
