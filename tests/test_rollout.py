from __future__ import annotations

import math

import pytest
import torch
from small_models import small_policy

from sage_lite import logprobs
from sage_lite.errors import Diverged, UserError
from sage_lite.logprobs import completion_logprobs, left_pad, length_buckets, positions
from sage_lite.rollout import completion_mask, sample

EOS = 7


@pytest.fixture(scope="module")
def policy():
    return small_policy()


@pytest.mark.parametrize(
    "tokens, mask",
    [
        ([1, 2, 3], [1, 1, 1]),  # cut off: stays in whole
        ([1, EOS, 3], [1, 1, 0]),
        ([EOS, 2, 3], [1, 0, 0]),
        ([1, EOS, EOS], [1, 1, 0]),  # padding is EOS too: only the first is live
        ([EOS, EOS, EOS], [1, 0, 0]),
    ],
)
def test_completion_mask(tokens, mask):
    assert completion_mask(torch.tensor(tokens), EOS).int().tolist() == mask


def test_completion_mask_knows_several_ends_and_batches():
    tokens = torch.tensor([[[1, 8, 2], [1, 2, 7]]])
    assert completion_mask(tokens, [7, 8]).int().tolist() == [[[1, 1, 0], [1, 1, 1]]]


def test_left_padding_ends_every_prompt_at_the_last_column():
    ids, mask = left_pad([[5, 6, 7], [8]], pad_id=0, device=torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert positions(mask).tolist() == [[0, 1, 2], [0, 0, 0]]


def test_sampling_follows_the_models_own_probabilities():
    """Frequencies of whole completions against their exact probabilities, on a model with six tokens."""
    policy = small_policy(vocab_size=6, eos_token_id=1, pad_token_id=0)
    policy.eos_ids = [1]
    policy.decode = lambda tokens, mask: ["" for _ in tokens]
    n = 20_000
    out = sample(policy, [[2, 3], [4]], n, max_new_tokens=2, generator=torch.Generator().manual_seed(0))
    for prompt, rows in zip([[2, 3], [4]], out.completions.split(n)):
        for first in range(6):
            seconds = [None] if first == 1 else range(6)
            for second in seconds:
                tokens = [first] if second is None else [first, second]
                with torch.no_grad():
                    logits = policy.model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
                exact = math.exp(sum(logits[len(prompt) - 1 + i, t].item() for i, t in enumerate(tokens)))
                hits = (rows[:, 0] == first) if second is None else (rows[:, 0] == first) & (rows[:, 1] == second)
                seen = hits.float().mean().item()
                assert abs(seen - exact) < 5 * math.sqrt(exact * (1 - exact) / n) + 1e-4, (tokens, seen, exact)


def test_rollouts_of_one_call_do_not_depend_on_the_other_prompts(policy):
    """Greedy: padding, shared prefixes and leaving the batch must not change what a prompt gets."""
    prompts = policy.encode(["1 2 3 = 6", "12", "9 9 9 = 27 and some more words"])
    together = sample(policy, prompts, 2, max_new_tokens=12, temperature=0.0)
    for i, prompt in enumerate(prompts):
        alone = sample(policy, [prompt], 1, max_new_tokens=12, temperature=0.0)
        for row in (2 * i, 2 * i + 1):
            live = together.mask[row]
            assert together.completions[row][live].tolist() == alone.completions[0][alone.mask[0]].tolist()


def test_mask_text_and_finished_agree(policy):
    prompts = policy.encode(["1 2 3 = 6", "7"])
    out = sample(policy, prompts, 64, max_new_tokens=6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(
        out.mask, completion_mask(torch.where(out.mask, out.completions, policy.eos_ids[0]), policy.eos_ids[0])
    )
    ends = out.completions.gather(1, out.mask.sum(-1, keepdim=True) - 1).squeeze(-1)
    assert torch.equal(ends == policy.eos_ids[0], out.finished)
    assert out.group.tolist() == [0] * 64 + [1] * 64
    assert not any("<|im_end|>" in text for text in out.texts)


def test_same_seed_same_rollouts(policy):
    prompts = policy.encode(["1 2 3 = 6"])
    a, b = (sample(policy, prompts, 8, max_new_tokens=8, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert a.texts == b.texts


def test_top_p_keeps_the_token_that_crosses_it():
    from sage_lite.rollout import _draw

    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = _draw(logits, torch.zeros(4000, dtype=torch.long), 1.0, 0.6, generator)
    assert set(drawn.tolist()) == {0, 1}
    assert abs((drawn == 0).float().mean().item() - 0.625) < 0.04


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompts": []}, "nothing to sample"),
        ({"prompts": [[]]}, "prompt without a token"),
        ({"group_size": 0}, "group_size"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_tokens": 250}, "context of 256"),
    ],
)
def test_bad_requests_say_what_is_wrong(policy, change, message):
    request = {"prompts": [[5] * 10], "group_size": 2, "max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0} | change
    with pytest.raises(UserError, match=message):
        sample(policy, request.pop("prompts"), request.pop("group_size"), **request)


def _reference_logprobs(policy, rollouts, temperature):
    """One rollout at a time, no padding, no cache."""
    out = torch.zeros(rollouts.mask.shape)
    for i, (tokens, live) in enumerate(zip(rollouts.completions, rollouts.mask)):
        prompt, tokens = rollouts.prompts[rollouts.group[i]], tokens[live]
        logits = policy.model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1] / temperature
        out[i, : len(tokens)] = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    return out


@pytest.mark.parametrize("worth", [1, 5, 10**9])
def test_length_buckets_hold_every_row_once_longest_first(worth):
    lengths = torch.tensor([3, 9, 1, 9, 4, 3])
    buckets = length_buckets(lengths, worth)
    assert sorted(torch.cat(buckets).tolist()) == list(range(6))
    assert all(lengths[b[0]] == lengths[b].max() for b in buckets)
    assert len(buckets) == {1: 4, 5: 2, 10**9: 1}[worth]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("worth", [1, 10**9])
def test_logprobs_and_gradient_equal_the_plain_ones(policy, share, temperature, worth, monkeypatch):
    monkeypatch.setattr(logprobs, "length_buckets", lambda lengths: length_buckets(lengths, worth))
    prompts = policy.encode(["1 2 3 = 6", "12", "9 9 9 = 27 and more"])
    rollouts = sample(policy, prompts, 6, max_new_tokens=5, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(2)) * rollouts.mask
    parameters = [p for _, p in policy.trainable()]
    expected = _reference_logprobs(policy, rollouts, temperature)
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    found = completion_logprobs(
        policy.causal_lm, prompts, rollouts.completions, rollouts.mask, rollouts.group,
        pad_id=policy.pad_id, temperature=temperature, share_prompts=share, chunk=16,
    )  # fmt: skip
    torch.testing.assert_close(found, expected.detach(), atol=2e-5, rtol=1e-5)
    for a, b in zip(torch.autograd.grad((found * weights).sum(), parameters), wanted):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item() + 1e-6, rtol=1e-4)


def test_logprobs_of_equal_rollouts_and_of_an_empty_mask(policy):
    prompts = policy.encode(["1 2"])
    tokens = torch.tensor([[20, 21, 1], [20, 21, 1], [20, 22, 1]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    found = completion_logprobs(policy.causal_lm, prompts, tokens, mask, torch.zeros(3, dtype=torch.long), pad_id=0)
    assert torch.equal(found[0], found[1]) and found[2].abs().sum() == 0
    found.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for _, p in policy.trainable())
    policy.model.zero_grad()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["lm_head.weight", "model.norm.weight"])
def test_probabilities_that_are_not_finite_are_said(temperature, broken):
    policy = small_policy(tie_word_embeddings=False)
    policy.model.get_parameter(broken).data[5] = float("nan")
    with pytest.raises(Diverged, match="probabilities are not finite"):
        sample(policy, policy.encode(["1 2 = 3"]), 2, max_new_tokens=3, temperature=temperature)


@pytest.mark.parametrize("prompts", ["3 5 7 = 22", ["3 5 7 = 22"]])
def test_text_instead_of_tokens_says_how_to_encode(policy, prompts):
    with pytest.raises(UserError, match="lists of token ids, got text .*policy.encode"):
        sample(policy, prompts, 2, max_new_tokens=3)
