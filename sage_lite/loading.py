"""Weights and tokenizers from a local folder or the hub, through transformers, PEFT and bitsandbytes."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any, Iterator

import torch

from sage_lite.errors import UserError

# On some CPUs, importing bitsandbytes (PEFT does, for any adapter) warns that an optional kernel is not installed.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def load_model(base: Any, dtype: torch.dtype, device: torch.device, four_bit: bool) -> torch.nn.Module:
    """A causal LM; with four_bit its linear layers, but the last, are nf4 with double quantisation (bitsandbytes)."""
    from transformers import AutoModelForCausalLM

    kwargs: dict[str, Any] = {_dtype_keyword(): dtype}
    if four_bit:
        from transformers import BitsAndBytesConfig

        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        kwargs["device_map"] = {"": device}
    model = _load(AutoModelForCausalLM, base, **kwargs)
    return model if four_bit else model.to(device)


def load_tokenizer(source: Any) -> Any:
    """The tokenizer of a model folder or hub id."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, source)


def load_config(source: Any) -> Any:
    """The configuration of a model folder or hub id: its shape, without its weights."""
    from transformers import AutoConfig

    return _load(AutoConfig, source)


def prepare_four_bit(model: torch.nn.Module) -> torch.nn.Module:
    """Everything that is not quantised in float32: norms and embeddings carry the small numbers of training."""
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def evaluation_mode(model: torch.nn.Module) -> torch.nn.Module:
    """Dropout off, in training too: rho must be 1 on fresh rollouts. Only the 4-bit layers, which have none, stay in
    training mode: on a CPU with AVX-512-BF16, bitsandbytes repacks the others into a form that passes no gradient on.
    """
    model.eval()
    for module in model.modules():
        if type(module).__module__.startswith("bitsandbytes."):
            module.training = True
    return model


def lora_config(rank: int, alpha: int | None) -> Any:
    """LoRA on all linear layers but the last, without dropout; alpha is twice the rank where it is not given."""
    from peft import LoraConfig

    if rank < 1:
        raise UserError(f"lora is a rank and must be >= 1, got {rank}")
    return LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def add_lora(model: torch.nn.Module, rank: int, alpha: int | None, seed: int) -> torch.nn.Module:
    """A new adapter around the model; its weights are float32 whatever the model's are, and depend on `seed` alone."""
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, lora_config(rank, alpha))


def adapter_config(path: Any) -> dict[str, Any] | None:
    """The settings of the PEFT adapter in a folder; None where there is no adapter, and for no folder."""
    if path is None:
        return None
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text()) if file.is_file() else None


def has_tokenizer(path: Any) -> bool:
    """Whether a tokenizer may be loaded from here: a hub id, or a folder that holds one."""
    return not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").is_file()


def eos_ids(tokenizer: Any, model: torch.nn.Module, source: str) -> list[int]:
    """Every token that ends a completion: the tokenizer's EOS and those of the model's generation settings."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if configured is not None:
        ids += [i for i in (configured if isinstance(configured, list) else [configured]) if i not in ids]
    if not ids:
        raise UserError(
            f"the tokenizer of {source} has no EOS token, so no completion could ever end: "
            "set eos_token in its tokenizer_config.json"
        )
    return ids


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Loading takes seconds here, and its bar would stand in every notebook's output."""
    from transformers.utils import logging as verbosity

    shown = verbosity.is_progress_bar_enabled()
    verbosity.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            verbosity.enable_progress_bar()


def _dtype_keyword() -> str:
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _load(cls, source: Any, **kwargs):
    looks_local = Path(source).is_absolute() or str(source).startswith((".", "~"))
    folder = Path(source).expanduser()
    wanted = "give a folder that holds config.json, or a hub id such as Qwen/Qwen2.5-1.5B"
    if looks_local and not folder.is_dir():
        raise UserError(f"no model folder at {source}: {wanted}")
    if folder.is_dir() and not any((folder / f).is_file() for f in ("config.json", "tokenizer_config.json")):
        raise UserError(f"the folder {source} holds no model: {wanted}")
    try:
        with no_progress_bar():
            return cls.from_pretrained(str(folder) if looks_local else str(source), **kwargs)
    except (OSError, ValueError) as error:  # the second for a folder that names no kind of model, and for odd settings
        first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(": ")
        raise UserError(f"could not load {source} as a model: {first}") from error
    except (RuntimeError, ImportError) as error:
        if "quantization_config" not in kwargs:
            raise
        raise UserError(f"4-bit loading does not work here, use four_bit=False: {error}") from error
