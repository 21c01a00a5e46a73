"""The same policy through Unsloth, whose kernels make LoRA training faster and leaner on a GPU.

Unsloth rewrites parts of transformers when it is imported, so it must be imported first: load the policy before
anything else imports transformers, or write `import unsloth` at the top of the notebook. Its kernels need a GPU;
without one it runs in its CPU mode, on stock transformers and PEFT, which computes the same and gains nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from typing import Any

import torch

from sage_lite.errors import UserError


def use(backend: str, adapter: bool) -> bool:
    """Whether to load through Unsloth, which is imported if so. backend: as in `load_policy`; adapter: is one trained?

    Raises UserError where Unsloth is asked for and not installed or not importable, or where nothing is an adapter.
    Warns where transformers was there first.
    """
    installed = importlib.util.find_spec("unsloth") is not None
    late = "transformers" in sys.modules and "unsloth" not in sys.modules
    if backend == "auto":
        if not (installed and adapter and torch.cuda.is_available() and not late):
            return False
    elif backend != "unsloth":
        return False
    if not installed:
        raise UserError("backend='unsloth' needs Unsloth: pip install 'sage-lite[unsloth]', or backend='transformers'")
    if not adapter:
        raise UserError("backend='unsloth' is for training an adapter: add lora=16, or use backend='transformers'")
    if late:
        warnings.warn(
            "transformers was imported before Unsloth, which then cannot replace all it wants to: restart, and load "
            "this policy first, or begin with `import unsloth`",
            stacklevel=3,
        )
    try:
        import unsloth  # noqa: F401
    except Exception as error:  # it checks GPU, drivers and versions as it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"importing Unsloth fails ({reason}): use backend='transformers'") from error
    return True


def load_model(base: Any, dtype: torch.dtype, device: torch.device, four_bit: bool) -> torch.nn.Module:
    """The causal LM as Unsloth loads it. Its own tokenizer is left aside: ours is the same for every backend."""
    from unsloth import FastLanguageModel

    from sage_lite.loading import load_config, no_progress_bar

    context = int(getattr(load_config(base), "max_position_embeddings", 0) or 4096)
    with no_progress_bar():
        model, _ = FastLanguageModel.from_pretrained(
            str(base),
            max_seq_length=context,  # longer inputs are cut without an error
            dtype=dtype,
            load_in_4bit=four_bit,
            device_map={"": device},
            use_gradient_checkpointing=False,
        )
    return model


def add_lora(model: torch.nn.Module, rank: int, alpha: int | None, seed: int) -> torch.nn.Module:
    """A new adapter on all linear layers, as `loading.add_lora`."""
    from unsloth import FastLanguageModel

    if rank < 1:
        raise UserError(f"lora is a rank and must be >= 1, got {rank}")
    return FastLanguageModel.get_peft_model(
        model,
        r=rank,
        lora_alpha=alpha or 2 * rank,
        lora_dropout=0,
        bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=False,
        random_state=seed,
    )
