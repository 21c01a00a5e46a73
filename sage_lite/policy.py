"""A language model as a policy: loading (tiny embedded, local folder or hub id; LoRA, 4-bit), its chat template, its
reference."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch

from sage_lite import folders, loading, unsloth_backend
from sage_lite.data import data_path
from sage_lite.device import best_dtype, pick_device
from sage_lite.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("transformers", "unsloth", "auto")


@dataclass
class Policy:
    """A causal language model, its tokenizer and what the rest of the library asks of them.

    model: a transformers model, or a PEFT model around one. source: where it came from. reference_model: a frozen copy,
    only where all weights are trained and a reference was asked for (with LoRA the reference is the model with its
    adapter off). four_bit: whether the frozen weights are 4-bit. backend: what loaded it. loss_scale: see
    `gradient_scale`.
    """

    model: torch.nn.Module
    tokenizer: Any
    source: str
    reference_model: torch.nn.Module | None = None
    reference_adapter: str | None = None
    eos_ids: list[int] = field(default_factory=list)
    four_bit: bool = False
    backend: str = "transformers"
    loss_scale: float = 1.0

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
        return prompt_style(self.tokenizer)

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
        return encode(self.tokenizer, prompts)

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
                _refuse_trained_biases(self.model)
                with self.model.disable_adapter():
                    yield self.causal_lm
            else:
                raise UserError(
                    "all weights are trained and no reference was kept: load_policy(..., keep_reference=True)"
                )

    def gradient_scale(self, denominator: float) -> float:
        """What the loss is multiplied by before the backward pass, and the gradient divided by after it.

        1 but where activations are float16: there the gradient of a mean over many tokens is so small that it rounds to
        0. A power of two, about the denominator of that mean; `loss_scale` halves it after every overflow.
        """
        if not self._float16:
            return 1.0
        return self.loss_scale * 2.0 ** max(0, math.floor(math.log2(denominator)))

    def gradient_overflowed(self) -> None:
        """A gradient was not finite: say so, or in float16, where that is how a scale is found, take half of it."""
        if self._float16:
            self.loss_scale /= 2
        else:
            warnings.warn("the gradient was not finite, so the model was left as it is: lower lr", stacklevel=3)

    @property
    def _float16(self) -> bool:
        formats = {p.dtype for p in self.model.parameters()}
        return torch.float16 in formats | {getattr(m, "compute_dtype", None) for m in self.model.modules()}

    def save(self, folder: str | Path) -> None:
        """Write adapter (with LoRA) or weights as safetensors, and the tokenizer, so that load_policy(folder) gives it
        back."""
        kwargs = {"selected_adapters": ["default"]} if self.is_adapter else {}
        with loading.no_progress_bar():
            self.model.save_pretrained(folder, safe_serialization=True, **kwargs)
        self.tokenizer.save_pretrained(folder)
        if self.is_adapter:
            (Path(folder) / "policy.json").write_text(json.dumps({"four_bit": self.four_bit}))


def load_policy(
    name_or_path: str | Path | None = None,
    *,
    adapter: str | Path | None = None,
    lora: int = 0,
    lora_alpha: int | None = None,
    four_bit: bool | None = None,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    keep_reference: bool = False,
    seed: int = 0,
    backend: str = "transformers",
    train: bool = True,
) -> Policy:
    """Load a causal language model to sample from and to train; None gives the tiny Qwen2.5 that comes with the
    library.

    name_or_path: a local folder, or a hub id; of a run's folder the last checkpoint. A folder that holds a PEFT adapter
    is loaded on the base model it names, and training continues with that adapter; `adapter` names such a folder to put
    on `name_or_path` instead.
    lora: rank of a new adapter on all linear layers, 0 trains every weight. four_bit: nf4 with double quantisation
    (bitsandbytes), needs an adapter to train; None: as the given adapter was trained, else no.
    dtype: "auto" (float32 where all weights are trained, else what the device does well), "float32", "bfloat16",
    "float16". keep_reference: keep a frozen copy of the start, needed for a KL term when the start itself is trained.
    seed: of the adapter's random start. train: False to sample only, in the format that the device does well.

    backend: "unsloth" takes Unsloth's kernels (`sage_lite.unsloth_backend`, which says what must come first); "auto"
    takes them where they are installed, there is a GPU for them, an adapter is trained, and transformers has not been
    imported yet. Raises UserError: no such folder, four_bit without an adapter, a tokenizer without EOS.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose auto, {', '.join(DTYPES)}")
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; choose {', '.join(BACKENDS)}")
    name_or_path, adapter = run_weights(name_or_path), run_weights(adapter)
    path = data_path("tiny_qwen2") if name_or_path is None else name_or_path
    source = "embedded tiny Qwen2.5" if name_or_path is None else str(name_or_path)
    if adapter is not None:
        if loading.adapter_config(adapter) is None:
            raise UserError(f"no adapter in {adapter}: a PEFT adapter's folder holds adapter_config.json")
        base, source = path, f"{adapter} on {source}"
    else:
        adapter, base = (path, base_of(path)) if loading.adapter_config(path) is not None else (None, path)
    if adapter is not None and lora:
        raise UserError(f"{adapter} is an adapter already and goes on training; leave lora out")
    if four_bit is None:
        four_bit = adapter is not None and trained_four_bit(adapter)
    if four_bit and train and not lora and adapter is None:
        raise UserError("four_bit=True freezes the quantised weights, so there is nothing to train: add lora=16")
    fast = unsloth_backend.use(backend, bool(lora) or adapter is not None)
    device = pick_device(device)
    if dtype != "auto":
        torch_dtype = DTYPES[dtype]
    else:  # steps of 1e-6 vanish in the rounding of 16-bit weights, so trained weights are kept in 32
        torch_dtype = best_dtype(device) if lora or adapter is not None or not train else torch.float32

    tokenizer = loading.load_tokenizer(adapter if adapter is not None and loading.has_tokenizer(adapter) else base)
    if fast:
        model = unsloth_backend.load_model(base, torch_dtype, device, four_bit)
    else:
        model = loading.load_model(base, torch_dtype, device, four_bit)
    if four_bit and not fast and (lora or adapter is not None):  # Unsloth prepares its models itself
        model = loading.prepare_four_bit(model)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    elif lora:
        model = (unsloth_backend if fast else loading).add_lora(model, lora, lora_alpha, seed)
        # The embedded model's path differs from machine to machine: no base name in a saved adapter means that model.
        model.peft_config["default"].base_model_name_or_path = "" if name_or_path is None else str(base)
    policy = Policy(model, tokenizer, source, eos_ids=loading.eos_ids(tokenizer, model, source), four_bit=four_bit,
                    backend="unsloth" if fast else "transformers")  # fmt: skip
    if keep_reference and adapter is not None:
        _refuse_trained_biases(model)
        model.load_adapter(str(adapter), adapter_name="reference", is_trainable=False)
        model.set_adapter("default")  # older PEFT leaves the first adapter frozen after loading a second
        _freeze_adapter(model, "reference")
        policy.reference_adapter = "reference"
    elif keep_reference and not policy.is_adapter:
        policy.reference_model = copy.deepcopy(model).requires_grad_(False).eval()
    loading.evaluation_mode(model)
    return policy


def run_weights(path: str | Path | None) -> str | Path | None:
    """The last checkpoint of a run whose folder is given, with ~ expanded; all else as it is."""
    if path is None or not Path(path).expanduser().is_dir():
        return path
    found = folders.find(path)
    return path if found == Path(path) else found


def base_of(path: str | Path | None) -> str | Path:
    """Where the weights of a model are: the base that an adapter's folder names, else the folder or hub id itself."""
    found = loading.adapter_config(path)
    if path is None or (found is not None and not found.get("base_model_name_or_path")):
        return data_path("tiny_qwen2")
    return path if found is None else found["base_model_name_or_path"]


def trained_four_bit(adapter: str | Path) -> bool:
    """Whether an adapter's folder says that it was trained on 4-bit weights (`Policy.save` writes that)."""
    file = Path(adapter) / "policy.json"
    return file.is_file() and bool(json.loads(file.read_text()).get("four_bit"))


def prompt_style(tokenizer: Any) -> str:
    """Which wording of a task's prompt a model knows: a key in its tokenizer's configuration, or "instruct"."""
    return tokenizer.init_kwargs.get("prompt_style", "instruct")


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each user message inside the tokenizer's chat template; bare text where it has none."""
    if tokenizer.chat_template is None:
        return [tokenizer(p)["input_ids"] for p in prompts]
    chats = ([{"role": "user", "content": p}] for p in prompts)
    # Template first, ids second: what apply_chat_template(tokenize=True) returns differs between transformers 4 and 5.
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    return [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]


def _freeze_adapter(model, name: str) -> None:
    for n, p in model.named_parameters():
        if f".{name}." in n:
            p.requires_grad_(False)


def _refuse_trained_biases(model) -> None:
    """PEFT keeps no copy of a bias that it trains: with the adapter off, such a model is not its base."""
    bias = model.peft_config["default"].bias
    if bias != "none":
        raise UserError(
            f"this adapter trains biases too (bias={bias!r}), so turning it off does not give its base back, and there "
            "is no reference for a KL term: use beta=0, or an adapter with bias='none'"
        )
