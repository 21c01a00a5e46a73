"""The ways in which training a language model goes wrong without an error, each with the value that is right.

Others are tested where their part is: padding and shared prefixes in test_rollout, micro-batches, dead groups and
missing rewards in test_update, the chat template and a trained adapter as its own reference in test_policy, merging in
test_export, running out of memory in test_oom.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from small_models import four_bit_policy, small_policy
from test_update import NoStep, _batch, _close, _gradient

from sage_lite import advantages, logprobs, rollout
from sage_lite.config import learning_rate
from sage_lite.data import data_path
from sage_lite.errors import UserError
from sage_lite.evaluation import evaluate
from sage_lite.logprobs import completion_logprobs, left_pad, recomputed_activations
from sage_lite.policy import load_policy
from sage_lite.recipes import recipe
from sage_lite.rollout import sample
from sage_lite.tasks import Task
from sage_lite.trainer import TrainConfig, train
from sage_lite.update import update

TOKENS = torch.tensor([[3, 20, 21, 22]])


def _task(words=(1, 2, 3, 4)) -> Task:
    rows = [{"n": n} for n in words]
    return Task("words", rows, rows, {"short": lambda r: "9 " * r["n"] + "="},
                lambda text, row: float(bool(text) and ord(text[0]) % 2 == 0), lambda row: None,
                max_new_tokens={"short": 4})  # fmt: skip


def _logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def base(tmp_path):
    small_policy(tie_word_embeddings=False).save(tmp_path / "base")
    return tmp_path / "base"


def _adapter(base, folder, **settings):
    """An adapter trained elsewhere, with PEFT alone."""
    from peft import LoraConfig, get_peft_model

    policy = load_policy(base, device="cpu")
    torch.manual_seed(0)
    model = get_peft_model(policy.model, LoraConfig(r=4, target_modules="all-linear", **settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


# Padding, EOS, temperature


def test_left_padding_keeps_positions_where_the_model_learnt_them():
    """Rotary positions forgive a shifted row, learnt ones, as in GPT-2, do not: each prompt begins at position 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    policy = small_policy()
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=len(policy.tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=4)
    policy.model = GPT2LMHeadModel(shape).eval()
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(3.0)
    if not hasattr(policy.model, "get_decoder"):  # transformers 4
        policy.model.get_decoder = lambda: policy.model.transformer
    prompts = policy.encode(["9 9 9 9 9 9", "1", "2 3"])
    ids, mask = left_pad(prompts, policy.pad_id, policy.device)
    with torch.no_grad():
        wrong = policy.model(ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None]).logits[1, -1]
        assert (wrong - policy.model(torch.tensor([prompts[1]])).logits[0, -1]).abs().max() > 0.1
    together = sample(policy, prompts, 2, max_new_tokens=6, temperature=0.0)
    for i, prompt in enumerate(prompts):
        alone = sample(policy, [prompt], 1, max_new_tokens=6, temperature=0.0)
        assert together.texts[2 * i] == alone.texts[0]
        tokens = alone.completions[0][alone.mask[0]]
        logits = policy.model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        for share in (True, False):
            found = completion_logprobs(policy.model, prompts, together.completions, together.mask, together.group,
                                        pad_id=policy.pad_id, share_prompts=share)  # fmt: skip
            torch.testing.assert_close(found[2 * i][together.mask[2 * i]], wanted, atol=1e-4, rtol=1e-4)


def test_pad_equal_to_eos_changes_nothing():
    plain, same = small_policy(), small_policy()
    ends = list(range(30, 150))  # of some 260 tokens, so that completions end early, at different lengths
    plain.eos_ids = same.eos_ids = ends
    same.tokenizer.pad_token = same.tokenizer.convert_ids_to_tokens(ends[0])
    assert same.pad_id == ends[0] and plain.pad_id not in ends
    (a, rewards), (b, _) = _batch(plain), _batch(same)
    assert torch.equal(a.mask, b.mask) and torch.equal(a.finished, b.finished) and a.texts == b.texts
    assert len(set(a.mask.sum(-1).tolist())) > 2 and a.finished.any()
    wanted, _ = _gradient(plain, a, rewards, share_prompts=False)
    for share in (True, False):
        _close(_gradient(same, b, rewards, share_prompts=share)[0], wanted)


def test_a_completion_that_never_ends_stays_in_whole():
    policy = small_policy()
    policy.eos_ids = [10**6]  # no token of this model
    rollouts, rewards = _batch(policy)
    assert rollouts.mask.all() and not rollouts.finished.any() and rollouts.mask.shape[1] == 6
    gradient, _ = _gradient(policy, rollouts, rewards)
    assert gradient.norm() > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_the_sampler_drew_with(temperature, monkeypatch):
    policy, drawn_with, multinomial = small_policy(), [], torch.multinomial

    def spy(probs, *args, **kwargs):
        token = multinomial(probs, *args, **kwargs)
        drawn_with.append(probs.gather(-1, token).log().item())
        return token

    monkeypatch.setattr(torch, "multinomial", spy)
    prompts = policy.encode(["1 2 3 = 6"])
    out = sample(policy, prompts, 1, max_new_tokens=8, temperature=temperature, generator=torch.Generator())
    found = completion_logprobs(policy.causal_lm, prompts, out.completions, out.mask, out.group, pad_id=policy.pad_id,
                                temperature=temperature)  # fmt: skip
    torch.testing.assert_close(found[out.mask].tolist(), drawn_with, atol=1e-4, rtol=1e-4)


def test_at_any_temperature_rho_is_one_before_the_first_step():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    optimizer = NoStep([p for _, p in policy.trainable()], lr=1.0)
    numbers = update(policy, optimizer, rollouts, rewards, advantages.sage(rewards), recipe("sage"), minibatches=2,
                     temperature=0.6, grad_clip=0.0, generator=torch.Generator().manual_seed(0))  # fmt: skip
    assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-4) and numbers["clip_share"] == 0.0


# Adapters and their reference


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens", "norm"])
def test_adapter_off_is_the_base_with_whole_modules_trained_too(base, tmp_path, saved):
    folder = _adapter(base, tmp_path / "adapter", modules_to_save=[saved])
    policy, wanted = load_policy(folder, device="cpu"), load_policy(base, device="cpu")
    assert any("modules_to_save" in name for name, _ in policy.trainable())
    assert not torch.allclose(_logits(policy.model), _logits(wanted.model))
    rollouts, _ = _batch(wanted)
    with policy.reference() as reference:
        torch.testing.assert_close(_logits(reference), _logits(wanted.model))
        call = functools.partial(completion_logprobs, prompts=rollouts.prompts, completions=rollouts.completions,
                                 mask=rollouts.mask, group=rollouts.group, pad_id=policy.pad_id)  # fmt: skip
        torch.testing.assert_close(call(reference), call(wanted.causal_lm).detach())


def test_an_adapter_with_whole_modules_keeps_itself_as_reference(base, tmp_path):
    folder = _adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    policy = load_policy(folder, keep_reference=True, device="cpu")
    start, names = _logits(policy.model), [name for name, _ in policy.trainable()]
    for _, parameter in policy.trainable():
        parameter.data.add_(0.1)
    with policy.reference() as reference:
        torch.testing.assert_close(_logits(reference), start)
    assert not torch.allclose(_logits(policy.model), start)
    assert [name for name, _ in policy.trainable()] == names and not any("reference" in name for name in names)


def test_trained_biases_are_refused_where_a_reference_is_needed(base, tmp_path):
    folder = _adapter(base, tmp_path / "adapter", bias="all")
    with pytest.raises(UserError, match="bias='all'"):
        load_policy(folder, keep_reference=True, device="cpu")
    policy = load_policy(folder, device="cpu")
    with pytest.raises(UserError, match="does not give its base back"), policy.reference():
        pass


def test_an_adapter_goes_on_another_folder_than_the_one_it_names(base, tmp_path):
    folder = _adapter(base, tmp_path / "adapter")
    wanted = _logits(load_policy(folder, device="cpu").model)
    moved = base.rename(tmp_path / "moved")
    assert torch.equal(_logits(load_policy(moved, adapter=folder, device="cpu").model), wanted)
    with pytest.raises(UserError, match="no adapter in"):
        load_policy(moved, adapter=moved, device="cpu")
    with pytest.raises(UserError, match="adapter already"):
        load_policy(moved, adapter=folder, lora=4, device="cpu")


@pytest.mark.parametrize("four_bit", [False, True])
def test_training_moves_the_adapter_and_nothing_else(four_bit):
    policy = four_bit_policy() if four_bit else load_policy(data_path("tiny_qwen2"), lora=4, device="cpu")
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    config = TrainConfig(steps=2, batch_size=4, group_size=4, lr=1e-2, beta=0.01, weight_decay=0.1, progress=False)
    result = train(config, policy, _task())
    assert all(line["grad_norm"] > 0 for line in result.metrics)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name


def test_a_four_bit_adapter_says_so_and_is_loaded_so(tmp_path):
    policy = four_bit_policy()
    for _, parameter in policy.trainable():
        torch.nn.init.normal_(parameter, std=0.1)
    policy.save(tmp_path)
    again, other = load_policy(tmp_path, device="cpu"), load_policy(tmp_path, four_bit=False, device="cpu")
    assert again.four_bit and not other.four_bit
    torch.testing.assert_close(_logits(again.model), _logits(policy.model))
    assert (_logits(other.model) - _logits(policy.model)).abs().max() > 0.01
    assert load_policy(data_path("tiny_qwen2"), four_bit=True, train=False, device="cpu").four_bit  # nothing to train
    rates = [learning_rate(TrainConfig(), p) for p in (again, other)]
    assert rates[0] == rates[1]  # by the number of weights, not by the bytes they are packed in


# Gradient checkpointing


def test_gradient_checkpointing_gives_the_same_gradient():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    plain, _ = _gradient(policy, rollouts, rewards)
    saved, _ = _gradient(policy, rollouts, rewards, gradient_checkpointing=True)
    _close(saved, plain)


def test_gradient_checkpointing_with_frozen_inputs_trains_lora_b(base):
    policy = load_policy(base, lora=4, device="cpu")
    rollouts, rewards = _batch(policy)
    plain, _ = _gradient(policy, rollouts, rewards)
    passes = []
    layer = policy.causal_lm.get_decoder().layers[0]
    hook = layer.mlp.register_forward_pre_hook(lambda *_: passes.append(layer.mlp.training))
    saved, _ = _gradient(policy, rollouts, rewards, gradient_checkpointing=True)
    hook.remove()
    _close(saved, plain)
    norms = {name: p.grad.norm().item() for name, p in policy.trainable()}
    assert all(norm > 0 for name, norm in norms.items() if "lora_B" in name)
    assert passes == [False, False]  # computed again, and nothing in the layer believes that it is in training mode
    assert not any(m.training for m in policy.model.modules())
    assert not any(getattr(m, "gradient_checkpointing", False) for m in policy.model.modules())


def test_gradient_checkpointing_leaves_dropout_off_or_refuses(base, tmp_path):
    policy = load_policy(_adapter(base, tmp_path / "adapter", lora_dropout=0.5), device="cpu")
    rollouts, rewards = _batch(policy)
    plain, _ = _gradient(policy, rollouts, rewards)
    _close(_gradient(policy, rollouts, rewards, gradient_checkpointing=True)[0], plain)
    dropping = small_policy(attention_dropout=0.1)
    with pytest.raises(UserError, match="attention_dropout=0.1"), recomputed_activations(dropping.causal_lm):
        pass


def test_a_run_with_gradient_checkpointing_has_the_same_numbers():
    config = TrainConfig(steps=3, batch_size=4, group_size=4, lr=1e-3, progress=False)
    plain = train(config, small_policy(), _task()).metrics
    saved = train(dataclasses.replace(config, gradient_checkpointing=True), small_policy(), _task()).metrics
    for a, b in zip(plain, saved):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3) and a["reward"] == b["reward"]


# float16


def test_gradients_do_not_vanish_in_float16(base):
    """A mean over very many tokens: each token's gradient is far below the smallest float16 number."""
    long = {"normalization": "constant"}
    exact, half = (load_policy(base, lora=4, dtype=d, device="cpu") for d in ("float32", "float16"))
    assert {p.dtype for _, p in half.trainable()} == {torch.float32}
    rollouts, rewards = _batch(exact)
    values = advantages.sage(rewards)

    def gradient(policy):
        optimizer = NoStep([p for _, p in policy.trainable()], lr=1.0)
        method = dataclasses.replace(recipe("sage"), **long)
        update(policy, optimizer, rollouts, rewards, values, method, grad_clip=0.0, max_length=10**8)
        return torch.cat([p.grad.flatten() for _, p in policy.trainable()])

    wanted = gradient(exact)
    assert wanted.abs().max() < 6e-8  # the smallest positive float16 number
    assert (gradient(half) - wanted).norm() < 0.05 * wanted.norm()
    half.gradient_scale = lambda denominator: 1.0
    assert (gradient(half) - wanted).norm() > 0.5 * wanted.norm()


def test_an_overflow_leaves_the_model_alone_and_halves_the_scale(base):
    policy = load_policy(base, lora=4, dtype="float16", device="cpu")
    before = {name: p.detach().clone() for name, p in policy.trainable()}
    rollouts, rewards = _batch(policy)
    policy.loss_scale = 2.0**40
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()], lr=0.1, weight_decay=0.1)
    numbers = update(policy, optimizer, rollouts, rewards, advantages.sage(rewards), recipe("sage"))
    assert numbers["skipped_steps"] == 1 and numbers["optimizer_steps"] == 0 and policy.loss_scale == 2.0**39
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable())


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights():
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    before = torch.cat([p.detach().flatten() for _, p in policy.trainable()]).clone()
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    hook = policy.trainable()[0][1].register_hook(lambda gradient: gradient * float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        numbers = update(policy, optimizer, rollouts, rewards, advantages.sage(rewards), recipe("sage"))
    hook.remove()
    assert numbers["skipped_steps"] == 1
    assert torch.equal(before, torch.cat([p.detach().flatten() for _, p in policy.trainable()]))


# Context


def test_prompts_longer_than_the_context_are_named_and_can_be_left_out():
    task, config = _task((1, 2, 30, 200)), TrainConfig(steps=1, batch_size=2, group_size=2, progress=False)
    with pytest.raises(UserError, match="max_prompt_tokens=252"):
        train(config, small_policy(), task)
    with pytest.raises(UserError, match="context of 256"):
        evaluate(small_policy(), task, samples=1)
    with pytest.warns(UserWarning, match="1 of 4 training prompts"):
        result = train(dataclasses.replace(config, max_prompt_tokens=252), small_policy(), task)
    assert len(result.metrics) == 1
    with pytest.raises(UserError, match="the shortest of 4 has"):
        train(dataclasses.replace(config, max_prompt_tokens=2), small_policy(), task)


def test_a_prompt_that_just_fits_the_context_is_taken():
    policy = small_policy()
    [prompt] = policy.encode(["9 " * 100])
    fits = policy.context_length - len(prompt)
    out = sample(policy, [prompt], 1, max_new_tokens=fits, temperature=0.0)
    assert out.mask.sum() >= 1
    with pytest.raises(UserError, match="context"):
        sample(policy, [prompt], 1, max_new_tokens=fits + 1)


# Batches of rollouts


def test_rollouts_in_batches_are_the_same_in_the_same_order(monkeypatch):
    policy, widths = small_policy(), []
    prompts = policy.encode([f"{i} {'9 ' * (7 * i % 5)}=" for i in range(5)])

    def spy(*args):
        padded = left_pad(*args)
        widths.append((padded[0].shape[1], int(padded[1].sum(-1).min())))
        return padded

    monkeypatch.setattr(rollout, "left_pad", spy)
    settings = {"max_new_tokens": 6, "temperature": 0.0}
    whole = sample(policy, prompts, 3, **settings)
    for size in (1, 2, 4, 7, 100):
        del widths[:]
        parts = sample(policy, prompts, 3, rollout_batch=size, **settings)
        assert parts.texts == whole.texts and torch.equal(parts.mask, whole.mask)
        assert widths == sorted(widths)  # prompts of like length together
        assert len(widths) == -(-15 // size)
    drawn = [sample(policy, prompts, 3, max_new_tokens=6, rollout_batch=4, generator=torch.Generator().manual_seed(2))
             for _ in range(2)]  # fmt: skip
    assert drawn[0].texts == drawn[1].texts


def test_a_cpu_takes_no_more_at_once_than_its_allocator_keeps():
    model_config = small_policy().causal_lm.config  # 2 key-value heads of 8
    assert rollout.rows_at_once(model_config, 1000, torch.device("cpu")) == 24 * 2**20 // (4 * 2 * 8 * 1000)
    assert rollout.rows_at_once(model_config, 10**9, torch.device("cpu")) == 1
    assert rollout.rows_at_once(model_config, 1000, torch.device("cuda")) is None


def test_a_large_vocabulary_is_drawn_from_in_pieces(monkeypatch):
    policy = small_policy(vocab_size=6, eos_token_id=1, pad_token_id=0)
    policy.eos_ids, policy.decode = [1], lambda tokens, mask: ["" for _ in tokens]
    prompts, n = [[2, 3], [4], [5, 5, 2]], 4000
    whole = sample(policy, prompts, 1, max_new_tokens=3, temperature=0.0)
    monkeypatch.setattr(rollout, "LOGITS", 12)  # two rows at a time
    parts = sample(policy, prompts, 1, max_new_tokens=3, temperature=0.0)
    assert torch.equal(parts.completions, whole.completions)
    out = sample(policy, prompts, n, max_new_tokens=1, generator=torch.Generator().manual_seed(0))
    for prompt, rows in zip(prompts, out.completions.split(n)):
        exact = policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        seen = torch.bincount(rows[:, 0], minlength=6) / n
        assert (seen - exact).abs().max() < 5 * (0.25 / n) ** 0.5


class _Tuples(torch.nn.Module):
    """A decoder whose cache is a tuple of keys and values a layer, as Unsloth's are."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder, self.seen = decoder, 0

    def forward(self, past_key_values=None, **kwargs):
        from transformers import DynamicCache

        cache = None
        if past_key_values is not None:
            cache = DynamicCache()
            for i, (keys, values) in enumerate(past_key_values):
                cache.update(keys, values, i)
                self.seen += 1
        out = self.decoder(past_key_values=cache, **kwargs)
        if out.past_key_values is not None:
            out.past_key_values = tuple((layer.keys, layer.values) for layer in out.past_key_values.layers)
        return out


def test_a_cache_of_tuples_gives_the_same_rollouts_and_gradient():
    from transformers import DynamicCache

    if not hasattr(DynamicCache(), "layers"):
        pytest.skip("an older transformers, which Unsloth's tuples are not tried with")
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    wanted, _ = _gradient(policy, rollouts, rewards)
    decoder = _Tuples(policy.causal_lm.get_decoder())
    policy.causal_lm.get_decoder = lambda: decoder
    again, _ = _batch(policy)
    assert again.texts == rollouts.texts
    _close(_gradient(policy, rollouts, rewards)[0], wanted)
    assert decoder.seen > 0


def test_logits_come_in_the_chunks_asked_for(monkeypatch):
    policy, seen, chunked = small_policy(), [], logprobs.chunked_logprobs
    rollouts, rewards = _batch(policy)
    plain, _ = _gradient(policy, rollouts, rewards)

    def spy(*args, chunk, **kwargs):
        seen.append(chunk)
        return chunked(*args, chunk=chunk, **kwargs)

    monkeypatch.setattr(logprobs, "chunked_logprobs", spy)
    _close(_gradient(policy, rollouts, rewards, logits_chunk=3)[0], plain)
    assert set(seen) == {3}
