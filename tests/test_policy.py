from __future__ import annotations

import json
import shutil

import pytest
import torch
from small_models import small_policy

from sage_lite.data import data_path
from sage_lite.errors import UserError
from sage_lite.policy import load_policy


def _logits(model, ids=((3, 20, 21, 22),)):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


@pytest.fixture
def folder(tmp_path):
    """A saved local model folder, as a user has one."""
    small_policy().save(tmp_path / "model")
    return tmp_path / "model"


def test_the_embedded_model_is_an_ordinary_qwen2():
    policy = load_policy(device="cpu")
    assert type(policy.causal_lm).__name__ == "Qwen2ForCausalLM"
    assert 0.8e6 < sum(p.numel() for p in policy.model.parameters()) < 1.5e6
    assert policy.prompt_style == "short" and policy.eos_ids == [policy.tokenizer.eos_token_id]
    size = sum(f.stat().st_size for f in data_path("tiny_qwen2").iterdir())
    assert size < 6e6 and not list(data_path("tiny_qwen2").glob("*.bin"))


def test_prompts_go_through_the_chat_template():
    policy = load_policy(device="cpu")
    [ids] = policy.encode(["3 5 7 = 22"])
    assert policy.tokenizer.decode(ids) == "<|user|>3 5 7 = 22<|im_end|><|assistant|>"
    policy.tokenizer.chat_template = None
    assert policy.tokenizer.decode(policy.encode(["3 5"])[0]) == "3 5"


def test_saved_and_loaded_again_is_the_same_model(folder):
    again = load_policy(folder, device="cpu")
    assert torch.equal(_logits(again.model), _logits(small_policy().model))
    assert again.source == str(folder) and again.prompt_style == "short"


def test_lora_starts_at_the_base_and_only_the_adapter_trains(folder):
    base, policy = load_policy(folder, device="cpu"), load_policy(folder, lora=4, device="cpu")
    torch.testing.assert_close(_logits(policy.model), _logits(base.model))
    assert policy.trainable() and all("lora_" in name for name, _ in policy.trainable())
    for name, p in policy.trainable():
        torch.nn.init.normal_(p, std=0.1)
    assert not torch.allclose(_logits(policy.model), _logits(base.model))
    with policy.reference() as reference:
        torch.testing.assert_close(_logits(reference), _logits(base.model))


def test_lora_start_depends_on_the_seed_alone(folder):
    a, b, c = (load_policy(folder, lora=2, seed=s, device="cpu") for s in (0, 0, 1))
    first = [dict(p.trainable()) for p in (a, b, c)]
    assert all(torch.equal(first[0][n], first[1][n]) for n in first[0])
    assert any(not torch.equal(first[0][n], first[2][n]) for n in first[0])


def test_adapter_saves_loads_and_keeps_itself_as_reference(folder, tmp_path):
    policy = load_policy(folder, lora=4, device="cpu")
    for _, p in policy.trainable():
        torch.nn.init.normal_(p, std=0.1)
    policy.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    start = _logits(policy.model)
    again = load_policy(tmp_path / "adapter", keep_reference=True, device="cpu")
    torch.testing.assert_close(_logits(again.model), start)
    assert again.trainable() and not any("reference" in n for n, _ in again.trainable())
    for _, p in again.trainable():
        p.data.add_(0.1)
    with again.reference() as reference:  # not the bare base: the adapter it started from
        torch.testing.assert_close(_logits(reference), start)
    assert not torch.allclose(_logits(again.model), start)
    assert again.trainable() and not any("reference" in n for n, _ in again.trainable())


def test_an_adapter_of_the_embedded_model_names_no_folder_of_this_machine(tmp_path):
    load_policy(lora=2, device="cpu").save(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == ""
    assert load_policy(tmp_path, device="cpu").is_adapter


def test_full_training_keeps_a_frozen_copy_when_asked(folder):
    policy = load_policy(folder, keep_reference=True, device="cpu")
    start = _logits(policy.model)
    for _, p in policy.trainable():
        p.data.add_(0.05)
    with policy.reference() as reference:
        torch.testing.assert_close(_logits(reference), start)
    with pytest.raises(UserError, match="keep_reference"):
        with load_policy(folder, device="cpu").reference():
            pass


def test_four_bit_needs_and_gets_an_adapter(folder):
    with pytest.raises(UserError, match="lora"):
        load_policy(folder, four_bit=True, device="cpu")
    pytest.importorskip("bitsandbytes")
    try:
        policy = load_policy(data_path("tiny_qwen2"), four_bit=True, lora=4, device="cpu")
    except UserError as error:
        pytest.skip(f"no 4-bit on this CPU: {error}")  # older transformers knows 4-bit on GPUs only
    kinds = {type(m).__name__ for m in policy.model.modules()}
    assert "Linear4bit" in kinds
    logits = policy.model(torch.tensor([[3, 20, 21, 22]])).logits
    logits.float().square().mean().backward()
    moved = [p.grad.abs().max().item() for n, p in policy.trainable() if "lora_B" in n]
    assert min(moved) > 0


def test_four_bit_still_trains_after_it_has_sampled():
    """On some CPUs bitsandbytes repacks a layer that samples in evaluation mode, and then it passes no gradient on."""
    pytest.importorskip("bitsandbytes")
    try:
        policy = load_policy(four_bit=True, lora=4, device="cpu")
    except UserError as error:
        pytest.skip(f"no 4-bit on this CPU: {error}")  # older transformers knows 4-bit on GPUs only
    ids, gradients = torch.tensor([[3, 20, 21, 22]]), []
    for _ in range(2):
        policy.model.zero_grad()
        policy.model(ids).logits.square().mean().backward()
        gradients.append([p.grad.clone() for _, p in policy.trainable()])
        with torch.no_grad():
            policy.model(ids)
    for before, after in zip(*gradients):
        torch.testing.assert_close(before, after)


def test_weights_are_float32_where_all_of_them_train(folder):
    assert {p.dtype for p in load_policy(folder, device="cpu").model.parameters()} == {torch.float32}
    assert load_policy(folder, dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16


def test_clear_errors(folder, tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        load_policy(tmp_path / "nowhere", device="cpu")
    with pytest.raises(UserError, match="could not load"):
        load_policy("some-owner/some-model", device="cpu")  # offline: no network, no cache
    with pytest.raises(UserError, match="dtype"):
        load_policy(folder, dtype="int8", device="cpu")


def test_a_tokenizer_without_eos_is_refused(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    file = broken / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("eos_token")
    file.write_text(json.dumps(config | {"eos_token": None}))
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((broken / name).read_text())
        settings.pop("eos_token_id", None)
        (broken / name).write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no EOS"):
        load_policy(broken, device="cpu")


def test_a_device_that_is_not_there_is_said_in_one_line():
    for device in ("cuda:99", "tpu9"):
        with pytest.raises(UserError, match="device") as error:
            load_policy(device=device)
        assert "\n" not in str(error.value)
