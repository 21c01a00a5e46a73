"""A language model as a policy: loading (tiny embedded, local folder or hub id; LoRA, 4-bit), its chat template, its
reference."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch

from sage_lite.data import data_path
from sage_lite.device import best_dtype, pick_device
from sage_lite.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Policy:
    """A causal language model, its tokenizer and what the rest of the library asks of them.

    model: a transformers model, or a PEFT model around one. source: where it came from. reference_model: a frozen copy,
    only where all weights are trained and a reference was asked for (with LoRA the reference is the model with its
    adapter off).
    """

    model: torch.nn.Module
    tokenizer: Any
    source: str
    reference_model: torch.nn.Module | None = None
    reference_adapter: str | None = None
    eos_ids: list[int] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def causal_lm(self) -> torch.nn.Module:
        """The transformers model itself, LoRA layers included, without the PEFT wrapper around it."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def is_adapter(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and completion together, that the model was made for."""
        return int(getattr(self.causal_lm.config, "max_position_embeddings", 0) or 10**9)

    @property
    def prompt_style(self) -> str:
        """Which wording of a task's prompt the model knows: a key in its tokenizer's configuration, or "instruct"."""
        return self.tokenizer.init_kwargs.get("prompt_style", "instruct")

    @property
    def pad_id(self) -> int:
        """Any valid id: padding is always masked out, so a tokenizer without a pad token borrows its EOS."""
        pad = self.tokenizer.pad_token_id
        return self.eos_ids[0] if pad is None else pad

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained parameters with their names, in a fixed order."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each user message inside the model's own chat template; bare text for a model that has none."""
        if self.tokenizer.chat_template is None:
            return [self.tokenizer(p)["input_ids"] for p in prompts]
        chats = ([{"role": "user", "content": p}] for p in prompts)
        # Template first, ids second: what apply_chat_template(tokenize=True) returns differs between transformers 4 and
        # 5.
        texts = [self.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        return [self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]

    def decode(self, completions: torch.Tensor, mask: torch.Tensor) -> list[str]:
        """The text of each completion, up to and without its EOS. Shapes: completions, mask [N, T]."""
        ids = [row[live].tolist() for row, live in zip(completions.cpu(), mask.cpu().bool())]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    @contextlib.contextmanager
    def reference(self) -> Iterator[torch.nn.Module]:
        """The frozen model that KL is measured against, as a causal LM, without gradient."""
        with torch.no_grad():
            if self.reference_model is not None:
                yield self.reference_model
            elif self.reference_adapter is not None:
                active = self.model.active_adapter
                self.model.set_adapter(self.reference_adapter)
                try:
                    yield self.causal_lm
                finally:
                    self.model.set_adapter(active)
                    _freeze_adapter(self.model, self.reference_adapter)
            elif self.is_adapter:
                with self.model.disable_adapter():
                    yield self.causal_lm
            else:
                raise UserError(
                    "all weights are trained and no reference was kept: load_policy(..., keep_reference=True)"
                )

    def save(self, folder: str | Path) -> None:
        """Write adapter (with LoRA) or weights as safetensors, and the tokenizer, so that load_policy(folder) gives it
        back."""
        kwargs = {"selected_adapters": ["default"]} if self.is_adapter else {}
        with _no_progress_bar():
            self.model.save_pretrained(folder, safe_serialization=True, **kwargs)
        self.tokenizer.save_pretrained(folder)


def load_policy(
    name_or_path: str | Path | None = None,
    *,
    lora: int = 0,
    lora_alpha: int | None = None,
    four_bit: bool = False,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    keep_reference: bool = False,
    seed: int = 0,
) -> Policy:
    """Load a causal language model to sample from and to train; None gives the tiny Qwen2.5 that comes with the
    library.

    name_or_path: a local folder, or a hub id. A folder that holds a PEFT adapter is loaded on the base model it names,
    and training continues with that adapter. lora: rank of a new adapter on all linear layers, 0 trains every weight.
    four_bit: nf4 with double quantisation (bitsandbytes), needs lora. dtype: "auto" (float32 where all weights are
    trained, else what the device does well), "float32", "bfloat16", "float16". keep_reference: keep a frozen copy of
    the start, needed for a KL term when the start itself is trained. seed: of the adapter's random start. Raises
    UserError: no such folder, four_bit without lora, a tokenizer without EOS.
    """
    path = data_path("tiny_qwen2") if name_or_path is None else name_or_path
    source = "embedded tiny Qwen2.5" if name_or_path is None else str(name_or_path)
    device = torch.device(device) if device is not None else pick_device()
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}")
    adapter = _adapter_config(path)
    if dtype != "auto":
        torch_dtype = DTYPES[dtype]
    else:  # steps of 1e-6 vanish in the rounding of 16-bit weights, so trained weights are kept in 32
        torch_dtype = best_dtype(device) if lora or adapter is not None else torch.float32
    if four_bit and not lora and adapter is None:
        raise UserError("four_bit=True freezes the quantised weights, so there is nothing to train: add lora=16")

    base = path if adapter is None else (adapter["base_model_name_or_path"] or data_path("tiny_qwen2"))
    tokenizer = _load(_tokenizer_class(), path if _has_tokenizer(path) else base)
    model = _load_model(base, torch_dtype, device, four_bit)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(path), is_trainable=True)
    elif lora:
        model = _add_lora(model, lora, lora_alpha, four_bit, seed, base if name_or_path is not None else "")
    policy = Policy(model, tokenizer, source, eos_ids=_eos_ids(tokenizer, model, source))
    if keep_reference and adapter is not None:
        model.load_adapter(str(path), adapter_name="reference", is_trainable=False)
        model.set_adapter("default")  # older PEFT leaves the first adapter frozen after loading a second
        _freeze_adapter(model, "reference")
        policy.reference_adapter = "reference"
    elif keep_reference and not policy.is_adapter:
        policy.reference_model = copy.deepcopy(model).requires_grad_(False).eval()
    model.eval()  # dropout off, in training too: rho must be 1 on fresh rollouts
    return policy


def _load_model(base: Any, dtype: torch.dtype, device: torch.device, four_bit: bool) -> torch.nn.Module:
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


def _dtype_keyword() -> str:
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _add_lora(model, rank: int, alpha: int | None, four_bit: bool, seed: int, base: Any) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if rank < 1:
        raise UserError(f"lora is a rank and must be >= 1, got {rank}")
    if four_bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    # The embedded model's path differs from machine to machine: an empty base name in a saved adapter means that model.
    model.peft_config["default"].base_model_name_or_path = str(base)
    return model


def _adapter_config(path: Any) -> dict | None:
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return None
    import json

    return json.loads(file.read_text())


def _has_tokenizer(path: Any) -> bool:
    return not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").is_file()


def _tokenizer_class():
    from transformers import AutoTokenizer

    return AutoTokenizer


def _load(cls, source: Any, **kwargs):
    looks_local = Path(source).is_absolute() or str(source).startswith((".", "~"))
    if looks_local and not Path(source).expanduser().is_dir():
        raise UserError(
            f"no model folder at {source}: give a folder that holds config.json, or a hub id such as Qwen/Qwen2.5-1.5B"
        )
    try:
        with _no_progress_bar():
            return cls.from_pretrained(str(Path(source).expanduser()) if looks_local else str(source), **kwargs)
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"could not load {source} as a model: {first}") from error
    except (RuntimeError, ImportError) as error:
        if "quantization_config" not in kwargs:
            raise
        raise UserError(f"4-bit loading does not work here, use four_bit=False: {error}") from error


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading takes seconds here, and its bar would stand in every notebook's output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _eos_ids(tokenizer, model, source: str) -> list[int]:
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


def _freeze_adapter(model, name: str) -> None:
    for n, p in model.named_parameters():
        if f".{name}." in n:
            p.requires_grad_(False)
