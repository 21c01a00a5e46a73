"""The Unsloth backend: what it says where it is absent, and the real thing, on its CPU mode, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from small_models import small_policy
from test_trainer import _config, _task

from sage_lite import unsloth_backend
from sage_lite.data import data_path
from sage_lite.errors import UserError
from sage_lite.policy import load_policy
from sage_lite.trainer import train

INSTALLED = importlib.util.find_spec("unsloth") is not None


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(unsloth_backend.importlib.util, "find_spec", lambda name: None)


def test_where_it_is_absent_the_error_names_the_extra(absent):
    with pytest.raises(UserError, match=r"pip install 'sage-lite\[unsloth\]'"):
        load_policy(lora=4, backend="unsloth", device="cpu")
    assert unsloth_backend.use("auto", True) is False and unsloth_backend.use("transformers", True) is False
    assert load_policy(lora=4, backend="auto", device="cpu").is_adapter


def test_it_is_for_adapters_and_unknown_backends_are_refused(monkeypatch):
    monkeypatch.setattr(unsloth_backend.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="add lora=16"):
        load_policy(backend="unsloth", device="cpu")
    with pytest.raises(UserError, match="unknown backend 'vllm'"):
        load_policy(backend="vllm", device="cpu")


def test_gradient_checkpointing_is_not_for_it():
    policy = small_policy()
    policy.backend = "unsloth"
    with pytest.raises(UserError, match="lower micro_batch_tokens"):
        train(_config(gradient_checkpointing=True), policy, _task())


def test_transformers_imported_first_is_warned_about(monkeypatch):
    import transformers  # noqa: F401

    monkeypatch.setattr(unsloth_backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.setattr(sys, "meta_path", [])  # importing it fails, as it may in a broken installation
    with pytest.warns(UserWarning, match="imported before Unsloth"):
        with pytest.raises(UserError, match="importing Unsloth fails"):
            unsloth_backend.use("unsloth", True)


_CHILD = """
import sys, json, warnings
import torch
from sage_lite.policy import load_policy
from sage_lite.trainer import TrainConfig, train
assert "transformers" not in sys.modules, "sage_lite must leave the first import of transformers to Unsloth"
with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)
    from sage_lite import unsloth_backend
    assert unsloth_backend.use("unsloth", True)
fast = load_policy(sys.argv[1], lora=4, backend="unsloth", device="cpu", dtype="float32", keep_reference=True)
plain = load_policy(sys.argv[1], lora=4, device="cpu", dtype="float32")
ids = torch.tensor([[3, 20, 21, 22]])
gap = (fast.model(ids).logits - plain.model(ids).logits).abs().max().item()
names = sorted(n for n, _ in fast.trainable())
assert names == sorted(n for n, _ in plain.trainable()), names[:3]
config = TrainConfig(steps=2, batch_size=8, group_size=8, max_new_tokens=16, lora=4, backend="unsloth", beta=0.01,
                     lr=1e-3, model=sys.argv[1], out=sys.argv[2], device="cpu", progress=False)
result = train(config)
moved = max(p.abs().max().item() for n, p in result.policy.trainable() if "lora_B" in n)
again = load_policy(sys.argv[2] + "/checkpoints/step-000002", device="cpu")
same = (again.model(ids).logits - result.policy.model(ids).logits).abs().max().item()
print("RESULT", json.dumps({"gap": gap, "moved": moved, "same": same, "metrics": result.metrics}))
"""


@pytest.mark.unsloth
@pytest.mark.skipif(not INSTALLED, reason="Unsloth is not installed")
def test_the_same_training_through_unsloth(tmp_path):
    """In a process of its own, since Unsloth has to be imported first."""
    import json

    env = {**os.environ, "UNSLOTH_FORCE_CPU": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path / "compiled")}
    command = [sys.executable, "-c", _CHILD, str(data_path("tiny_qwen2")), str(tmp_path / "run")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    found = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert found["gap"] < 1e-4 and found["moved"] > 0 and found["same"] < 1e-4
    assert all(line["grad_norm"] > 0 and line["kl"] >= 0 for line in found["metrics"])
