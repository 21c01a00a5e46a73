"""How much memory a run will need, before it starts: predicted from the model's shape, without its weights.

Weights, adapter, optimizer and the activations that a backward pass keeps are *counted*, on a copy of the model with
one and with two layers whose tensors have a shape and no content; the rest is arithmetic. What no count knows of, a
CUDA context (about half a GiB), kernels' workspaces, the allocator's gaps, is not in it:
`tests/benchmarks/bench_memory.py` compares with what is measured.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from sage_lite import device as machine
from sage_lite import loading
from sage_lite.config import TrainConfig
from sage_lite.policy import DTYPES
from sage_lite.rollout import LOGITS, rows_at_once

GIB = 2**30
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: 4 bits, an 8-bit scale for 64, a 32-bit scale for 256 of these
TOKENS = 64  # of the counted forward pass, one a row


@dataclass(frozen=True)
class Needs:
    """Bytes at the peak. What stays: weights, reference, adapter, optimizer; and what comes and goes in each phase."""

    weights: int
    reference: int
    adapter: int
    optimizer: int
    kv_cache: int
    sampling: int
    gradients: int
    activations: int
    passing: int
    logits: int
    step: int

    @property
    def fixed(self) -> int:
        return self.weights + self.reference + self.adapter + self.optimizer

    @property
    def rollout(self) -> int:
        """Peak while completions are sampled."""
        return self.fixed + self.kv_cache + self.sampling

    @property
    def training(self) -> int:
        """Peak in forward and backward pass or, if that is more, in the optimizer's step."""
        return self.fixed + self.gradients + max(self.activations + max(self.passing, self.logits), self.step)

    @property
    def peak(self) -> int:
        return max(self.rollout, self.training)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "reference": self.reference, "adapter": self.adapter, "Adam": self.optimizer}
        rows = {
            "always": (self.fixed, {name: size for name, size in parts.items() if size}),
            "rollout": (self.rollout, {"keys and values": self.kv_cache, "logits, activations": self.sampling}),
            "training": (
                self.training,
                {"gradients": self.gradients, "activations": self.activations, "logits": self.logits},
            ),
        }
        return "\n".join(
            f"{name:<9}{_gib(size):>11}   {', '.join(f'{part} {_gib(n)}' for part, n in inside.items())}"
            for name, (size, inside) in rows.items()
        )


def predict(
    config: TrainConfig,
    model_config: Any,
    *,
    prompt_tokens: int,
    max_new_tokens: int,
    adapter: dict[str, Any] | None = None,
) -> Needs:
    """Peak memory of a run in which every prompt has `prompt_tokens` and every completion `max_new_tokens` tokens.

    model_config: the transformers configuration of the model (`loading.load_config`). adapter: settings of the PEFT
    adapter that training starts from, if there is one; otherwise config.lora says whether one is made.
    """
    device = machine.pick_device(config.device)
    rank = config.lora or (adapter or {}).get("r", 0)
    dtype = _dtype(config, device, rank > 0)
    text = model_config.get_text_config()
    layers, hidden, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_width = 2 * (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    # With 4-bit weights, all else is float32 (loading.prepare_four_bit), and so is what flows between the layers.
    stream = torch.float32 if config.four_bit else dtype
    size, one = stream.itemsize, _counted(model_config, 1, stream, rank)
    two = _counted(model_config, 2, stream, rank)
    total = {k: one[k] + (layers - 1) * (two[k] - one[k]) for k in one}
    per_layer = two["saved"] - one["saved"]  # bytes a token

    weights = total["linear"] * (NF4 if config.four_bit else size) + total["other"] * size
    trained = total["adapter"] if rank else total["linear"] + total["other"]
    # A fresh adapter's reference is the base itself; a given one's start is kept beside it (`keep_reference`).
    reference = 0 if config.beta == 0 else 0 if config.lora else 4 * total["adapter"] if rank else weights
    # A 4-bit matrix is unpacked to be multiplied.
    unpacked = (two["largest"] * dtype.itemsize) if config.four_bit else 0

    length = prompt_tokens + max_new_tokens
    rows = config.batch_size * config.group_size
    rows = min(rows, config.rollout_batch or rows_at_once(model_config, length, device) or rows)
    prompts = math.ceil(rows / config.group_size)
    kv_cache = rows * length * kv_width * size * layers
    at_once = min(rows, max(1, LOGITS // vocabulary)) * vocabulary
    drawing = at_once * ((0 if size == 4 else size) + 4 * 3 + (4 * 6 if config.top_p < 1 else 0))
    attending = rows * length * (kv_width + 2 * heads * head_dim) * size  # one layer's, grown and for every head
    sampling = max(drawing, attending, prompts * prompt_tokens * per_layer) + unpacked

    # A micro-batch: rows of whole groups, as many as fit into micro_batch_tokens.
    whole = max(1, config.micro_batch_tokens // (config.group_size * length)) * config.group_size
    rows = min(config.batch_size * config.group_size, max(1, min(config.micro_batch_tokens // length, whole)))
    shared = config.share_prompts and not config.gradient_checkpointing
    queries = math.ceil(rows / config.group_size) * prompt_tokens + rows * max_new_tokens if shared else rows * length
    # Shared or not, every head sees the keys and values of the whole row; the counted pass has those of its own tokens.
    further = (rows * length - queries) * 2 * heads * head_dim * size
    mask = rows * (max_new_tokens if shared else length) * length * size
    layer = queries * per_layer + further + mask
    # Kept until the backward pass; and what one layer needs while it is passed, forwards again or backwards.
    activations = layers * (queries * hidden * size if config.gradient_checkpointing else layer)
    activations += 2 * queries * hidden * size
    passing = 2 * layer if config.gradient_checkpointing else layer
    if shared:  # the prompts' keys and values, taken along by every row until the forward pass ends
        passing = max(passing, rows * length * kv_width * size * layers)
    tokens = rows * max_new_tokens
    logits = min(config.logits_chunk, tokens) * vocabulary * ((0 if size == 4 else size) + 4 * 4)
    step = 4 * trained if device.type == "cuda" else 0  # torch's GPU Adam works on all weights at once
    parts = (weights, reference, 4 * total["adapter"], 8 * trained, kv_cache, sampling, 4 * trained)
    return Needs(*(int(n) for n in (*parts, activations, passing + unpacked, logits + unpacked, step)))


def plan(
    config: TrainConfig,
    model_config: Any,
    task: str,
    prompt_tokens: int,
    max_new_tokens: int,
    rows: int,
    source: str | None = None,
) -> str:
    """What a run will do and need, in a few lines, for the longest prompt and completions of full length.

    task, source: the task's name, and where its problems come from.
    """
    device = machine.pick_device(config.device)
    adapter = loading.adapter_config(config.model)
    rank = config.lora or (adapter or {}).get("r", 0)
    needs = predict(
        config, model_config, prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, adapter=adapter
    )
    rollouts = config.batch_size * config.group_size
    how = f"LoRA of rank {rank}" if rank else "all weights"
    how += " on 4-bit weights" if config.four_bit else ""
    model = "the embedded model" if config.model is None else config.model
    free = machine.memory(device).available
    lines = [
        f"{config.method} on {task} ({rows:,} prompts, the longest {prompt_tokens} tokens), {model}, {how}",
        *([] if source is None else [f"  problems: {source}"]),
        f"  rollouts: {config.batch_size} prompts x {config.group_size} = {rollouts:,} a step, at most "
        f"{rollouts * max_new_tokens:,} tokens; {rollouts * config.steps:,} rollouts, at most "
        f"{rollouts * max_new_tokens * config.steps:,} tokens in {config.steps:,} steps",
        f"  memory, predicted: {_gib(needs.peak)} at the peak"
        + ("" if free is None else f", {_gib(free)} are free on {device}"),
        *(f"    {line}" for line in str(needs).splitlines()),
    ]
    if free is not None and needs.peak > free:
        phase = "rollout_batch" if needs.rollout > needs.training else "micro_batch_tokens"
        lines.append(
            "    more than there is: loading may fail, take 4-bit weights or a smaller model"
            if needs.fixed > free
            else f"    more than there is: {phase} will be halved until it fits; a lower one saves the attempts"
        )
    return "\n".join(lines)


def _dtype(config: TrainConfig, device: torch.device, adapter: bool) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return machine.best_dtype(device) if adapter else torch.float32


def _counted(model_config: Any, layers: int, dtype: torch.dtype, rank: int) -> dict[str, float]:
    """A model of so many layers: its weights by kind, and the bytes that autograd keeps a token.

    linear: weights of the matrices that 4-bit loading packs; adapter: of LoRA on these; largest: of the largest one.
    """
    from transformers import AutoModelForCausalLM

    shape = copy.deepcopy(model_config)
    text = shape.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").to(dtype).eval()
    head = model.get_output_embeddings()
    matrices = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    linear = sum(m.weight.numel() for m in matrices)
    everything = sum(p.numel() for p in model.parameters())
    if rank:
        from peft import get_peft_model

        model = get_peft_model(model, loading.lora_config(rank, None), low_cpu_mem_usage=True).get_base_model()
    return {
        "linear": linear,
        "other": everything - linear,
        "adapter": sum(rank * (m.in_features + m.out_features) for m in matrices),
        "largest": max(m.weight.numel() for m in matrices),
        "saved": _saved_bytes(model) / TOKENS,
    }


def _saved_bytes(model: torch.nn.Module) -> int:
    """Bytes of all tensors but the weights that a forward pass of TOKENS rows of one token keeps for the backward."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that its address is not given to another one
        return tensor

    ids = torch.zeros(TOKENS, 1, dtype=torch.long, device="meta")
    mask = torch.ones(TOKENS, 1, 1, 1, dtype=torch.bool, device="meta")  # ready for the layers: left as it is
    # Rotary embeddings of transformers 4 switch autocast off, on a device that has none.
    no_autocast = mock.patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    with no_autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.1f} MiB"
