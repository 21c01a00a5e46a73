from __future__ import annotations

import pytest
import torch
from small_models import four_bit_policy, small_policy
from transformers import Qwen2Config

from sage_lite import advantages, memory
from sage_lite.config import TrainConfig
from sage_lite.data import data_path
from sage_lite.loading import load_config
from sage_lite.policy import load_policy
from sage_lite.recipes import recipe
from sage_lite.rollout import Rollouts
from sage_lite.tasks import Task
from sage_lite.trainer import plan, train
from sage_lite.update import update

TINY = data_path("tiny_qwen2")
PROMPT, COMPLETION = 24, 16


def qwen_1_5b() -> Qwen2Config:
    """The shape of Qwen2.5-1.5B."""
    return Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151_936, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip


def _needs(model_config=None, prompt_tokens=PROMPT, max_new_tokens=COMPLETION, **settings):
    config = TrainConfig(device="cpu", **({"batch_size": 4} | settings))
    return memory.predict(
        config, model_config or load_config(TINY), prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens
    )


@pytest.mark.parametrize("settings", [{}, {"lora": 4}, {"lora": 4, "dtype": "bfloat16"}])
def test_weights_adapter_and_adam_are_counted_to_the_byte(settings):
    policy, needs = load_policy(TINY, device="cpu", **settings), _needs(**settings)
    sizes = {name: p.numel() * p.element_size() for name, p in policy.model.named_parameters()}
    assert needs.weights == sum(size for name, size in sizes.items() if "lora_" not in name)
    assert needs.adapter == sum(size for name, size in sizes.items() if "lora_" in name)
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    for _, parameter in policy.trainable():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = sum(t.numel() * t.element_size() for s in optimizer.state.values() for k, t in s.items() if k != "step")
    assert needs.optimizer == moments == 2 * needs.gradients


def test_four_bit_weights_are_counted_to_a_few_percent():
    policy, needs = four_bit_policy(), _needs(lora=4, four_bit=True)
    stored = 0
    for name, parameter in policy.model.named_parameters():
        if "lora_" not in name:
            stored += parameter.numel() * parameter.element_size()
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                stored += sum(t.numel() * t.element_size() for t in (state.absmax, state.state2.absmax))
    assert needs.weights == pytest.approx(stored, rel=0.03)


def _batch(groups: int, vocabulary: int) -> tuple[Rollouts, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (groups, PROMPT), generator=generator).tolist()
    completions = torch.randint(3, vocabulary, (groups * 8, COMPLETION), generator=generator)
    mask = torch.ones_like(completions, dtype=torch.bool)
    return Rollouts(prompts, completions, mask, mask[:, 0], [""] * len(mask), 8), torch.eye(8)[:groups]


@pytest.mark.parametrize("settings", [{}, {"share_prompts": False}, {"lora": 4}, {"gradient_checkpointing": True},
                                      {"micro_batch_tokens": 700}, {"lora": 4, "dtype": "bfloat16"},
                                      {"micro_batch_tokens": 100}])  # fmt: skip
def test_activations_are_what_autograd_really_keeps(settings):
    """The largest sum of bytes that a real update saves for one backward pass, against the prediction."""
    config = TrainConfig(batch_size=4, logits_chunk=8, **settings)  # with so small a chunk, logits do not count
    policy = load_policy(TINY, lora=config.lora, dtype=config.dtype, device="cpu")
    vocabulary = policy.causal_lm.config.vocab_size
    rollouts, rewards = _batch(4, vocabulary)
    kept, sums = {}, []
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    class Keep(torch.optim.SGD):
        def step(self, closure=None):
            pass

    original = torch.Tensor.backward

    def backward(self, *args, **kwargs):
        sums.append(sum(size for size, _ in kept.values()))
        original(self, *args, **kwargs)
        kept.clear()

    torch.Tensor.backward = backward
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            update(policy, Keep([p for _, p in policy.trainable()], lr=1.0), rollouts, rewards,
                   advantages.sage(rewards), recipe("sage"), micro_batch_tokens=config.micro_batch_tokens,
                   share_prompts=config.share_prompts, gradient_checkpointing=config.gradient_checkpointing,
                   logits_chunk=config.logits_chunk)  # fmt: skip
    finally:
        torch.Tensor.backward = original
    assert _needs(**settings).activations == pytest.approx(max(sums), rel=0.12)


def test_what_saves_memory_is_predicted_to_save_it():
    shape, size = qwen_1_5b(), {"prompt_tokens": 200, "max_new_tokens": 256}
    full = _needs(shape, **size, batch_size=64)
    lora = _needs(shape, **size, batch_size=64, lora=16)
    assert full.peak > lora.peak and lora.optimizer < 0.05 * full.optimizer
    assert _needs(shape, **size, lora=16, gradient_checkpointing=True).activations < 0.1 * lora.activations
    assert _needs(shape, **size, lora=16, micro_batch_tokens=4096).activations < 0.4 * lora.activations
    assert _needs(shape, **size, lora=16, share_prompts=False).activations > lora.activations
    assert _needs(shape, **size, lora=16, four_bit=True).weights < 0.3 * lora.weights
    at_once = _needs(shape, **size, lora=16, batch_size=64, rollout_batch=512).kv_cache
    assert _needs(shape, **size, lora=16, batch_size=64, rollout_batch=64).kv_cache < 0.2 * at_once
    assert lora.kv_cache < at_once  # on a CPU, fewer are taken together anyway
    assert _needs(shape, **size, lora=16, logits_chunk=128).logits < 0.2 * lora.logits
    # 1,543,714,304 weights is what Qwen2.5-1.5B has
    assert full.weights == 4 * 1_543_714_304


def test_a_kept_reference_counts():
    assert _needs(beta=0.1).reference == _needs().weights
    assert _needs(beta=0.1, lora=4).reference == 0


def _task() -> Task:
    rows = [{"n": n} for n in range(4)]
    return Task("words", rows, rows, {"short": lambda r: f"{r['n']} ="}, lambda text, row: 0.0, lambda row: None,
                max_new_tokens={"short": 4})  # fmt: skip


def test_the_plan_says_rollouts_tokens_and_memory_before_the_weights_are_loaded(monkeypatch):
    config = TrainConfig(steps=10, batch_size=4, group_size=8, lora=4, device="cpu", progress=False)
    text = plan(config, _task())
    assert "4 prompts x 8 = 32 a step, at most 128 tokens; 320 rollouts, at most 1,280 tokens in 10 steps" in text
    assert "LoRA of rank 4" in text and "free on cpu" in text and "MiB" in text
    said = []
    train(TrainConfig(**{**vars(config), "steps": 1}), task=_task(), say=said.append)
    assert len(said) == 1 and said[0].startswith("sage on words")
    monkeypatch.setattr(memory.machine, "memory", lambda device: memory.machine.Memory(10**6, 10**6))
    assert "4-bit weights or a smaller model" in plan(config, _task())
    monkeypatch.setattr(memory.machine, "memory", lambda device: memory.machine.Memory(10**7, 8 * 10**6))
    assert "will be halved until it fits" in plan(config, _task())


def test_a_policy_given_is_planned_for_too():
    said, policy = [], small_policy()
    train(TrainConfig(steps=1, batch_size=2, group_size=2, progress=False), policy, _task(), say=said.append)
    weights = sum(p.numel() * 4 for p in policy.model.parameters())
    assert f"weights {weights / 2**20:.1f} MiB" in said[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("settings", [{}, {"lora": 16}, {"lora": 16, "gradient_checkpointing": True}])
def test_on_a_gpu_the_prediction_is_near_what_is_allocated(settings, tmp_path):
    small_policy(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
                 num_key_value_heads=2).save(tmp_path)  # fmt: skip
    config = TrainConfig(model=str(tmp_path), batch_size=4, device="cuda", dtype="float32", **settings)
    policy = load_policy(tmp_path, lora=config.lora, dtype="float32", device="cuda")
    rollouts, rewards = _batch(4, policy.causal_lm.config.vocab_size)
    rollouts.completions, rollouts.mask = rollouts.completions.cuda(), rollouts.mask.cuda()
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        update(policy, optimizer, rollouts, rewards, advantages.sage(rewards), recipe("sage"),
               gradient_checkpointing=config.gradient_checkpointing)  # fmt: skip
    needs = memory.predict(config, load_config(tmp_path), prompt_tokens=PROMPT, max_new_tokens=COMPLETION)
    assert needs.training == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.3)
