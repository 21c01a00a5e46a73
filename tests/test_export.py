from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from small_models import four_bit_policy, small_policy

from sage_lite import export
from sage_lite.data import data_path
from sage_lite.errors import UserError
from sage_lite.policy import load_policy

TINY = data_path("tiny_qwen2")
IDS = torch.tensor([[3, 20, 21, 22, 40, 41]])


def _logprobs(policy):
    with torch.no_grad():
        return policy.model(IDS).logits.float().log_softmax(-1)


def _trained(folder, policy=None):
    """An adapter that has moved: what a run leaves behind."""
    policy = policy or load_policy(TINY, lora=4, device="cpu")
    torch.manual_seed(0)
    for _, parameter in policy.trainable():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    policy.save(folder)
    return policy


def test_an_exported_adapter_is_the_adapter_and_nothing_else(tmp_path):
    policy = _trained(tmp_path / "run" / "checkpoints" / "step-000003")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    (checkpoint / "optimizer.safetensors").write_bytes(b"1234")
    (checkpoint / "manifest.json").write_text("{}")
    assert export.find(tmp_path / "run") == checkpoint and export.find(checkpoint) == checkpoint
    out = export.export_adapter(checkpoint, tmp_path / "out")
    names = {f.name for f in out.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not names & {"optimizer.safetensors", "manifest.json", "state.json"}
    torch.testing.assert_close(_logprobs(load_policy(out, device="cpu")), _logprobs(policy))
    from peft import PeftModel  # and PEFT alone reads it

    plain = PeftModel.from_pretrained(load_policy(TINY, device="cpu").model, str(out)).eval()
    torch.testing.assert_close(_logprobs(type("P", (), {"model": plain})), _logprobs(policy))


def test_merged_into_sixteen_bits_it_is_the_trained_model_to_rounding(tmp_path):
    policy = _trained(tmp_path / "adapter")
    merged = export.merge(tmp_path / "adapter", tmp_path / "out", device="cpu")
    assert merged.base == "original" and set(merged.gap) == {"original"} and merged.gap["original"] < 0.05
    with safe_open(next((tmp_path / "out").glob("*.safetensors")), "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}
    again = load_policy(tmp_path / "out", device="cpu")
    assert not again.is_adapter and again.prompt_style == "short"
    assert (_logprobs(again) - _logprobs(policy)).abs().mean() < 0.05


def test_an_adapter_of_a_four_bit_base_belongs_to_that_base(tmp_path):
    """Both merges measured: into the unpacked 4-bit weights it is the trained model, into the original ones it is not.

    With a model of a million weights, the 4-bit rounding of the base is far larger than the 16-bit rounding of the sum.
    """
    policy = _trained(tmp_path / "adapter", four_bit_policy())
    kept = export.merge(tmp_path / "adapter", tmp_path / "kept", device="cpu")
    other = export.merge(tmp_path / "adapter", tmp_path / "other", base="original", device="cpu")
    assert kept.base == "trained" and other.base == "original" and kept.gap == other.gap
    assert kept.gap["original"] > 5 * kept.gap["trained"]
    found = {m.base: (_logprobs(load_policy(m.folder, device="cpu")) - _logprobs(policy)).abs().mean().item()
             for m in (kept, other)}  # fmt: skip
    assert found["original"] > 5 * found["trained"]
    assert "4-bit weights it was trained on" in str(kept).splitlines()[0]
    assert "merged into the original weights" in str(other).splitlines()[0]
    said = json.loads((tmp_path / "other" / "merge.json").read_text())
    assert said["merged_into"] == "original" and said["four_bit"] and said["gap"] == other.gap


def test_all_weights_are_exported_in_sixteen_bits(tmp_path):
    small_policy().save(tmp_path / "model")
    out = export.export_weights(tmp_path / "model", tmp_path / "out", "float16")
    again = load_policy(out, device="cpu")
    assert (_logprobs(again) - _logprobs(small_policy())).abs().mean() < 0.01
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}


def test_clear_errors(tmp_path):
    small_policy().save(tmp_path / "model")
    with pytest.raises(UserError, match="no adapter"):
        export.export_adapter(tmp_path / "model", tmp_path / "out")
    with pytest.raises(UserError, match="no folder"):
        export.find(tmp_path / "nowhere")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no checkpoint yet"):
        export.find(tmp_path / "run")
    with pytest.raises(UserError, match="there already"):
        export.export_weights(tmp_path / "model", tmp_path / "model")
    with pytest.raises(UserError, match="unknown base"):
        export.merge(tmp_path / "model", tmp_path / "out", base="best")
    with pytest.raises(UserError, match="bfloat16 or float16"):
        export.export_weights(tmp_path / "model", tmp_path / "out", "int8")


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    _trained(tmp_path / "adapter")
    small_policy().save(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(export, "load_policy", lambda *_, **__: pytest.fail("the weights were loaded"))
        for out in ("/dev/null/x", tmp_path / "adapter" / "adapter_config.json" / "x"):
            for work, source in ((export.export_adapter, "adapter"), (export.merge, "adapter"),
                                 (export.export_weights, "model")):  # fmt: skip
                with pytest.raises(UserError, match="cannot write to the folder"):
                    work(tmp_path / source, out)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export.export_adapter("~/adapter", "~/out") == tmp_path / "out"
    with pytest.raises(UserError, match="no adapter"):
        export.export_adapter(tmp_path / "model", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    small_policy().save(tmp_path / "model")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.Policy, "save", full)
    with pytest.raises(UserError, match="could not write to .*No space left on device"):
        export.export_weights(tmp_path / "model", tmp_path / "out")
