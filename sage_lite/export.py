"""What a run leaves to others: its adapter as PEFT reads it, or one model with the adapter merged in, measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_lite import loading
from sage_lite.errors import UserError
from sage_lite.folders import find, make, writing
from sage_lite.policy import DTYPES, Policy, base_of, load_policy, trained_four_bit

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "policy.json")
BASES = ("trained", "original")


@dataclass(frozen=True)
class Merged:
    """A merged model: its folder, what the adapter was merged into, and how far it is from the model that was trained.

    gap: for each base that there is, mean |difference| of the log-probabilities of the next token, in nats.
    """

    folder: Path
    base: str
    dtype: str
    gap: dict[str, float]

    def __str__(self) -> str:
        what = {"trained": "the 4-bit weights it was trained on, unpacked", "original": "the original weights"}
        gaps = "; ".join(f"into {what[name]}: {value:.5f}" for name, value in self.gap.items())
        return (
            f"adapter merged into {what[self.base]}, saved in {self.dtype} to {self.folder}\n"
            f"mean |difference of log-probabilities| from the model that was trained, in nats: {gaps}"
        )


def export_adapter(adapter: str | Path, out: str | Path) -> Path:
    """Copy a PEFT adapter and its tokenizer, and nothing of the optimizer, to the new folder `out`."""
    adapter = find(adapter)
    _adapter_of(adapter)
    out = _new(out)
    files = [f for f in adapter.iterdir() if f.name in ADAPTER_FILES or _of_tokenizer(f.name)]
    with writing(out):
        for file in files:
            shutil.copy2(file, out / file.name)
    return out


def export_weights(folder: str | Path, out: str | Path, dtype: str = "bfloat16") -> Path:
    """Save a run that trained all weights as an ordinary model in 16 bits."""
    sixteen, out = _sixteen(dtype), _new(out)
    policy = load_policy(folder, device="cpu", dtype="float32")
    policy.model.to(sixteen)
    with writing(out):
        policy.save(out)
    return out


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    base: str = "trained",
    dtype: str = "bfloat16",
    device: str | torch.device | None = None,
) -> Merged:
    """Merge an adapter into its base, save the sum in 16 bits, and measure how far the result is from what was trained.

    An adapter trained on 4-bit weights has learnt to correct *those*: added to the original ones it is another model.
    base: "trained" merges into the weights it was trained on, 4-bit ones unpacked; "original" into the weights as they
    were before quantisation. Both gaps are measured and returned. model: the base model, where it is not at the place
    that the adapter names. The sum is taken in float32 and rounded once. Raises UserError for an `out` that is there.
    """
    if base not in BASES:
        raise UserError(f"unknown base {base!r}; choose {' or '.join(BASES)}")
    sixteen, adapter = _sixteen(dtype), find(adapter)
    settings, out = _adapter_of(adapter), _new(out)
    four_bit = trained_four_bit(adapter)
    if not four_bit:
        base = "original"
    source: dict[str, Any] = {"name_or_path": model, "adapter": adapter} if model else {"name_or_path": adapter}
    # float16 on a GPU without bfloat16, as in training; the weights that a 4-bit one stands for are the same anyway
    trained = load_policy(**source, four_bit=four_bit, dtype="float32", device=device, train=False)
    unpacked = _unpacked(trained.causal_lm) if four_bit else {}  # before bitsandbytes packs them for this CPU
    prompts = _probes(trained)
    wanted = _logprobs(trained.model, prompts)
    del trained
    gap, chosen = {}, None
    for name in BASES if four_bit else ("original",):
        merged = _merged(adapter, model or base_of(adapter), unpacked if name == "trained" else {}, device)
        merged.to(sixteen)
        gap[name] = float((_logprobs(merged, prompts) - wanted).abs().mean())
        if name == base:
            chosen = merged
    tokenizer = loading.load_tokenizer(adapter if loading.has_tokenizer(adapter) else model or base_of(adapter))
    about = {"adapter_of": settings.get("base_model_name_or_path"), "merged_into": base, "four_bit": four_bit}
    with writing(out), loading.no_progress_bar():
        chosen.save_pretrained(out, safe_serialization=True)
        tokenizer.save_pretrained(out)
        (out / "merge.json").write_text(json.dumps(about | {"gap": gap}, indent=1) + "\n")
    return Merged(out, base, dtype, gap)


def _merged(adapter, base, unpacked: dict[str, torch.Tensor], device) -> torch.nn.Module:
    from peft import PeftModel

    from sage_lite.device import pick_device

    model = loading.load_model(base, torch.float32, pick_device(device), four_bit=False)
    for name, weight in unpacked.items():
        model.get_submodule(name).weight.data.copy_(weight)
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().eval()


def _unpacked(causal_lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the 4-bit matrices stand for, by the name of their module in the model without an adapter."""
    import bitsandbytes as bnb

    return {
        name.removesuffix(".base_layer"): bnb.functional.dequantize_4bit(m.weight.data, m.weight.quant_state).float()
        for name, m in causal_lm.named_modules()
        if isinstance(m, bnb.nn.Linear4bit)
    }


def _probes(policy: Policy) -> list[list[int]]:
    texts = ["3 5 7 = 22", "What is 12 times 12? Think step by step.", "Tom has 3 apples and buys 4 more."]
    return policy.encode(texts)


@torch.no_grad()
def _logprobs(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    device = next(model.parameters()).device
    return torch.cat(
        [model(torch.tensor([p], device=device)).logits[0].float().log_softmax(-1).cpu().flatten() for p in prompts]
    )


def _adapter_of(folder: str | Path) -> dict[str, Any]:
    settings = loading.adapter_config(folder)
    if settings is None:
        raise UserError(f"{folder} holds no adapter (adapter_config.json): was it trained with lora?")
    return settings


def _new(out: str | Path) -> Path:
    """The folder to export to, made and tried before the models are loaded; UserError for one that holds something."""
    out = Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already: choose a new folder")
    return make(out)


def _of_tokenizer(name: str) -> bool:
    wanted = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template")
    return name.startswith(wanted)


def _sixteen(dtype: str) -> torch.dtype:
    if dtype not in ("bfloat16", "float16"):
        raise UserError(f"dtype must be bfloat16 or float16, got {dtype!r}")
    return DTYPES[dtype]
