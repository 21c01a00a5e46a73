"""Tiny random models for tests: the embedded tokenizer around a two-layer Qwen2 whose start depends on the seed
alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from sage_lite.data import data_path
from sage_lite.errors import UserError
from sage_lite.policy import Policy, load_policy


def small_policy(seed: int = 0, **changes) -> Policy:
    tokenizer = AutoTokenizer.from_pretrained(data_path("tiny_qwen2"))
    settings = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    ) | changes  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**settings)).eval()
    with torch.no_grad():  # a fresh model is nearly uniform: sharpen it, so that mistakes show in the log-probabilities
        for p in model.parameters():
            p.mul_(3.0)
    return Policy(model, tokenizer, "test", eos_ids=[tokenizer.eos_token_id])


def four_bit_policy(**settings) -> Policy:
    """The embedded model with a new adapter on 4-bit weights; skips where bitsandbytes cannot do that."""
    pytest.importorskip("bitsandbytes")
    try:
        return load_policy(data_path("tiny_qwen2"), lora=4, four_bit=True, device="cpu", **settings)
    except UserError as error:
        pytest.skip(f"no 4-bit on this CPU: {error}")  # older transformers knows 4-bit on GPUs only
