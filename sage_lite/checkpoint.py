"""Checkpoints that are whole or not there: written beside, flushed, renamed; safetensors and JSON only."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sage_lite.errors import Diverged, UserError
from sage_lite.folders import checkpoints, latest
from sage_lite.policy import Policy


def save_checkpoint(
    folder: Path, step: int, policy: Policy, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int = 2
) -> Path:
    """Write `folder/step-NNNNNN` with weights or adapter, optimizer, RNG states and `state`; keep the newest `keep`.

    All is written into a hidden folder first and renamed last, so a crash at any moment leaves either the whole
    checkpoint or none. Raises UserError when the disk is full, and Diverged for weights that are not finite; nothing
    partial is left then, and older checkpoints stay.
    """
    check_finite(policy, step, folder)
    final, partial = folder / f"step-{step:06d}", folder / f".partial-{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        policy.save(partial)
        tensors, groups = _flatten(optimizer)
        save_file(tensors | _rng_states(), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps({**state, "step": step, "param_groups": groups}, indent=1))
        sizes = {f.name: f.stat().st_size for f in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps(sizes, indent=1))
        for file in [*partial.iterdir(), partial]:
            _flush(file)
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"could not write the checkpoint of step {step} to {folder}: {getattr(error, 'strerror', None) or error}. "
            f"{last_whole(folder)}; free some space and go on with resume"
        ) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put weights, optimizer and RNG states of `path` back in place; returns the saved `state` with its "step"."""
    load_weights(path, policy)
    state = json.loads((path / "state.json").read_text())
    tensors = load_file(path / "optimizer.safetensors")
    rng = {k: tensors.pop(k) for k in list(tensors) if k.startswith("rng.")}
    optimizer.load_state_dict({"state": _unflatten(tensors), "param_groups": state.pop("param_groups")})
    torch.set_rng_state(rng["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in rng:
        torch.cuda.set_rng_state(rng["rng.cuda"])
    return state


def last_state(folder: Path) -> dict[str, Any]:
    """What the newest whole checkpoint in `folder` says besides weights and optimizer; there must be one."""
    return json.loads((latest(folder) / "state.json").read_text())


def load_weights(path: Path, policy: Policy) -> None:
    """Overwrite the policy's trained weights with those saved in `path` (adapter, or all of the model)."""
    files = sorted(path.glob("adapter_model.safetensors" if policy.is_adapter else "model*.safetensors"))
    if not files:
        wanted = "an adapter" if policy.is_adapter else "model weights"
        raise UserError(f"{path} holds no {wanted}: it was saved by a run with other lora settings")
    weights = {k: v for file in files for k, v in load_file(file).items()}
    if policy.is_adapter:
        from peft import set_peft_model_state_dict

        unexpected = set_peft_model_state_dict(policy.model, weights).unexpected_keys
    else:
        unexpected = policy.model.load_state_dict(weights, strict=False).unexpected_keys
    if unexpected:
        raise UserError(f"{path} does not fit this model: unexpected weight {unexpected[0]!r}")


def check_finite(policy: Policy, step: int, folder: Path | None) -> None:
    """Diverged unless all trained weights are finite after `step` of a run that has its checkpoints in `folder`."""
    if not torch.stack([p.detach().isfinite().all() for _, p in policy.trainable()]).all():
        raise Diverged(
            f"the weights are no longer finite since step {step}, which is not saved: lower lr. {last_whole(folder)}"
        )


def last_whole(folder: Path | None) -> str:
    """A sentence, for messages, on which checkpoint there is."""
    last = None if folder is None else latest(folder)
    return f"The last whole checkpoint is {last.name}" if last else "There is no checkpoint"


def required_bytes(policy: Policy) -> int:
    """Size of one checkpoint: the saved weights and Adam's two moments of the trained ones."""
    trained = sum(p.numel() * p.element_size() for _, p in policy.trainable())
    saved = trained if policy.is_adapter else sum(p.numel() * p.element_size() for p in policy.model.parameters())
    return saved + 2 * trained


def check_space(folder: Path, policy: Policy, keep: int) -> None:
    """UserError when the disk under `folder` cannot hold the kept checkpoints and the one being written."""
    need, free = (keep + 1) * required_bytes(policy), shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"{keep} checkpoints and one in the making need {need / 1e6:.0f} MB in {folder}, "
            f"where {free / 1e6:.0f} MB are free: "
            "free some space, choose another out folder or lower keep_checkpoints"
        )


def _flatten(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], list[dict]]:
    saved = optimizer.state_dict()
    tensors = {
        f"{index}.{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for index, entries in saved["state"].items()
        for key, value in entries.items()
    }
    return tensors, saved["param_groups"]


def _unflatten(tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    return state


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
