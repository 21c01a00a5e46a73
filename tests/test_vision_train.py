"""The classifier's loop: it learns, resumes to the same bits, evaluates exactly; its command and its records."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import signal
import sys

import pytest
import torch

from sage_lite import checkpoint, theory, vision, vision_loop
from sage_lite.errors import UserError
from sage_lite.vision_data import ImageSet, digit_numbers
from sage_lite.vision_loop import PRESETS, VisionConfig, VisionResult, evaluate, load_data, schedule, train
from sage_lite.vision_model import MODELS, build_model
from sage_lite.vision_runs import curve, leaves_at, mean_interval, predicted_leave, select
from sage_lite.vision_train import main

SMALL = {"digits": 1, "model": "tiny", "batch_size": 16, "lr": 0.05}


@pytest.fixture(scope="module")
def data():
    return digit_numbers(1, train_images=200, test_images=100)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# -- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["cross_entropy", "sage", "maxrl", "grpo", "rloo", "reinforce"])
def test_ten_digits_are_learnt_by_every_method(data, method):
    """With ten classes p starts at 1/10, and even REINFORCE moves within a hundred steps."""
    result = train(VisionConfig(method=method, rollouts=64, steps=100, **SMALL), data)
    first, last = result.metrics[0], result.metrics[-1]
    assert first["pass_rate"] < 0.2 and last["test_pass@1"] > 1.5 * first["pass_rate"]
    assert last["test_top1"] > 0.3 and last["test_loss"] < math.log(10)


@pytest.mark.parametrize("estimator", ["sampled", "expected"])
def test_every_estimator_trains(data, estimator):
    result = train(VisionConfig(estimator=estimator, rollouts=64, steps=60, **SMALL), data)
    assert result.metrics[-1]["test_top1"] > 0.3


@pytest.mark.parametrize("method", ["reinforce", "sage", "grpo", "maxrl"])
def test_a_matched_update_is_as_long_as_cross_entropys(method):
    """Pass rates from nearly 0 to nearly 1: the lengths agree in sum, the images' shares do not."""
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    labels, gradients = torch.arange(8) % 5, {}
    for name, matched in (("cross_entropy", False), (method, True)):
        config = VisionConfig(method=name, match_size=matched, estimator="expected", rollouts=64)
        z = logits.clone().requires_grad_()
        loss = vision_loop._loss(config, vision_loop.check(config), z, labels, torch.Generator())
        gradients[name] = torch.autograd.grad(loss, z)[0]
    lengths = {name: gradient.norm(dim=-1) for name, gradient in gradients.items()}
    assert gradients[method].norm().item() == pytest.approx(gradients["cross_entropy"].norm().item(), rel=1e-6)
    assert not torch.allclose(lengths[method], lengths["cross_entropy"], rtol=0.05)


@pytest.mark.parametrize("method", ["reinforce", "sage", "grpo"])
def test_at_a_matched_size_equal_pass_rates_give_the_update_of_cross_entropy(method):
    """Every image has the same p, so the methods differ by one factor, and match_size takes it out."""
    row, labels = torch.tensor([0.3, -2.0, 1.1, 0.4], dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    logits = torch.stack([row.roll(i - 1) for i in range(4)])  # the label's logit is -2 in each
    found = {}
    for name, matched in (("cross_entropy", False), (method, True), (method, False)):
        config = VisionConfig(method=name, match_size=matched, estimator="expected", rollouts=16)
        z = logits.clone().requires_grad_()
        loss = vision_loop._loss(config, vision_loop.check(config), z, labels, torch.Generator())
        found[name, matched] = torch.autograd.grad(loss, z)[0]
    assert torch.allclose(found[method, True], found["cross_entropy", False], rtol=1e-6)
    assert not torch.allclose(found[method, False], found["cross_entropy", False], rtol=0.05)


def test_the_same_seed_is_the_same_run_and_another_is_not(data):
    a, b, c = (train(VisionConfig(steps=3, seed=s, **SMALL), data) for s in (0, 0, 1))
    assert a.metrics == b.metrics and a.metrics != c.metrics


def test_a_run_does_not_touch_the_global_random_state(data):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train(VisionConfig(steps=1, **SMALL), data)
    assert torch.get_rng_state().equal(before)


def test_diverging_logits_stop_the_run_with_advice(data):
    with pytest.raises(UserError, match="lower the learning rate"):
        train(VisionConfig(method="sign", steps=50, **{**SMALL, "lr": 1e12}), data)


# -- resume ----------------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_to_the_same_bits(data, tmp_path):
    """Crops and cosine included: what a resume could restart is a function of the step, or in the checkpoint."""
    config = VisionConfig(steps=6, checkpoint_every=2, schedule="cosine", warmup=0.3, crop=0.5, size=8, eval_every=2,
                          out=str(tmp_path / "whole"), **SMALL)
    whole = train(config, data)
    half = dataclasses.replace(config, out=str(tmp_path / "half"))
    train(half, data)
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-000006")  # as if it had been killed after step 4
    resumed = train(dataclasses.replace(half, resume=True), data)
    assert resumed.metrics == whole.metrics and len(whole.metrics) == 6  # of the whole run, also after a resume
    for (name, a), b in zip(weights(whole.model).items(), weights(resumed.model).values()):
        assert a.equal(b), name
    lines = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("whole", "half")]
    assert lines[0] == lines[1] and lines[0].count("\n") == 6


def test_a_finished_run_is_not_resumed_and_a_damaged_one_says_so(data, tmp_path):
    config = VisionConfig(steps=2, out=str(tmp_path), **SMALL)
    train(config, data)
    with pytest.raises(UserError, match="is at step 2 already: give more than 2 steps"):
        train(dataclasses.replace(config, resume=True), data)
    assert len(train(dataclasses.replace(config, resume=True, steps=4), data).metrics) == 4
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json is missing"):
        train(dataclasses.replace(config, resume=True, steps=6), data)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the folder"):
        train(dataclasses.replace(config, out=str(tmp_path / "file")), data)


def test_ctrl_c_during_an_evaluation_loses_nothing(data, tmp_path, monkeypatch):
    """The step that was being evaluated is saved before the run stops."""
    whole, calls = vision_loop.evaluate, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return whole(*arguments)

    monkeypatch.setattr(vision_loop, "evaluate", interrupted)
    result = train(VisionConfig(steps=9, eval_every=2, out=str(tmp_path), **SMALL), data)
    assert result.stopped_early and len(result.metrics) == 4
    assert checkpoint.latest(tmp_path / "checkpoints").name == "step-000004"


def test_a_checkpoint_holds_no_pickle(data, tmp_path):
    train(VisionConfig(steps=1, out=str(tmp_path), **SMALL), data)
    files = {file.suffix for file in checkpoint.latest(tmp_path / "checkpoints").iterdir()}
    assert files <= {".json", ".safetensors"}


def test_a_folder_with_a_run_is_neither_overwritten_nor_resumed_as_another(data, tmp_path):
    config = VisionConfig(steps=1, out=str(tmp_path), **SMALL)
    train(config, data)
    with pytest.raises(UserError, match="already holds a run"):
        train(config, data)
    with pytest.raises(UserError, match="method was 'sage'"):
        train(dataclasses.replace(config, method="grpo", resume=True, steps=2), data)
    with pytest.raises(UserError, match="resume needs out"):
        train(VisionConfig(resume=True, **SMALL), data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_mixed_precision_on_a_gpu_learns_and_resumes(data, tmp_path):
    config = VisionConfig(rollouts=64, steps=60, checkpoint_every=30, out=str(tmp_path), device="cuda", **SMALL)
    assert train(config, data).metrics[-1]["test_top1"] > 0.3
    shutil.rmtree(tmp_path / "checkpoints" / "step-000060")
    resumed = train(dataclasses.replace(config, resume=True), data)
    assert resumed.metrics[0]["step"] == 31 and resumed.metrics[-1]["test_top1"] > 0.3


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "message"), [
    ({"method": "sages"}, "unknown advantage 'sages'"), ({"batch_size": 1}, "batch_size must be .* at least 2, got 1"),
    ({"eval_every": -1}, "eval_every"), ({"seed": 2**40}, "seed"), ({"weight_decay": -1.0}, "weight_decay"),
    ({"rollouts": 1}, "sage compares the rollouts of a group"), ({"limit": 5}, "limit"),
    ({"crop": 0.5, "size": 224}, "cannot crop images of 8 x 8 pixels to size 224"),
    ({"steps": 0}, "steps"), ({"lr": 0.0}, "lr and epochs"), ({"momentum": 1.0}, "momentum in"),
    ({"warmup": 1.0}, "warmup"), ({"schedule": "step"}, "unknown schedule 'step'"), ({"rollouts": 0}, "group_size"),
    ({"estimator": "exact"}, "unknown estimator 'exact'"), ({"model": "vit"}, "unknown model 'vit'"),
    ({"advantage_params": {"tau": -1}}, "tau"), ({"device": "tpu9"}, "device"), ({"data": "nothing"}, "neither"),
])
def test_bad_settings_are_said(change, message):
    with pytest.raises(UserError, match=message):
        train(VisionConfig(**{**SMALL, "steps": 1, **change}))


def test_presets_are_the_papers_and_every_preset_is_a_config():
    imagenet = VisionConfig(**PRESETS["imagenet"])
    assert (imagenet.model, imagenet.epochs, imagenet.rollouts) == ("resnet50", 20, 1024)
    assert (imagenet.lr, imagenet.momentum, imagenet.weight_decay) == (0.1, 0.9, 1e-4)
    assert imagenet.schedule == "cosine" and imagenet.warmup > 0 and imagenet.crop == 0.08
    for preset in PRESETS.values():
        VisionConfig(**preset)
    table = vision_loop.check(VisionConfig())
    assert table.gain[0] == pytest.approx(1024 / (1 + 1023 * math.exp(-5)) - 1, rel=1e-6)  # tau is 0.2


def test_schedule_warms_up_and_falls_along_half_a_cosine():
    config = VisionConfig(steps=100, warmup=0.1, schedule="cosine")
    factors = [schedule(config, step) for step in range(100)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0 and factors[55] == pytest.approx(0.5)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[-1] < 0.001
    assert [schedule(dataclasses.replace(config, schedule="constant"), s) for s in (10, 99)] == [1.0, 1.0]


def test_epochs_count_images(data):
    assert len(train(VisionConfig(epochs=0.5, **SMALL), data).metrics) == round(0.5 * 200 / 16)


# -- the model -------------------------------------------------------------------------------------------------------


def test_models_have_the_sizes_of_their_names():
    sizes = {name: sum(p.numel() for p in build_model(name, 1000).parameters()) for name in ("resnet18", "resnet50")}
    assert sizes == {"resnet18": 11_689_512, "resnet50": 25_557_032}  # as torchvision's


def test_small_images_are_pooled_less_and_weights_come_from_the_seed():
    fine, coarse = build_model("tiny", 10, channels=1, height=8), build_model("tiny", 10, channels=1, height=64)
    x = torch.zeros(2, 1, 8, 24)
    assert fine(x, output_hidden_states=True).hidden_states[0].shape[-2:] == (4, 12)
    assert coarse(x, output_hidden_states=True).hidden_states[0].shape[-2:] == (2, 6)
    a, b, c = (weights(build_model("tiny", 10, seed=s))["classifier.1.weight"] for s in (0, 0, 1))
    assert a.equal(b) and not a.equal(c)
    assert "tiny" in MODELS


# -- evaluation ------------------------------------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """Logits that do not depend on the image."""

    def forward(self, pixels):
        return type("Output", (), {"logits": torch.tensor([1.0, 2.0, 0.5]).expand(len(pixels), 3)})


def test_evaluation_is_exact_over_all_images_and_batches():
    images = ImageSet(torch.tensor([0, 1, 1, 2]), list("abc"), torch.zeros(4, 1, 8, 8, dtype=torch.uint8))
    found = evaluate(Fixed(), images, torch.zeros(1, 1, 1), torch.ones(1, 1, 1), batch_size=3)
    p = torch.tensor([1.0, 2.0, 0.5]).double().softmax(-1)[images.labels]
    assert found["test_top1"] == 0.5
    assert found["test_loss"] == pytest.approx(-p.log().mean().item(), rel=1e-6)
    assert found["test_pass@1"] == pytest.approx(p.mean().item(), rel=1e-6)
    assert found["test_pass@128"] == pytest.approx((1 - (1 - p) ** 128).mean().item(), rel=1e-6)


def test_images_in_a_folder_train_too(tmp_path):
    from PIL import Image

    for label, colour in enumerate(("red", "lime", "blue")):
        (tmp_path / colour).mkdir()
        for i in range(4):
            Image.new("RGB", (40, 30), colour).save(tmp_path / colour / f"{i}.png")
    config = VisionConfig(data=str(tmp_path), size=32, crop=0.5, model="tiny", batch_size=6, steps=25, rollouts=64)
    assert load_data(config)[0].pixels.shape == (12, 3, 36, 36)
    assert train(config).metrics[-1]["test_top1"] == 1.0  # no test images: measured on the training images


# -- records ---------------------------------------------------------------------------------------------------------


def test_record_command_writes_each_run_once(tmp_path, capsys):
    file = tmp_path / "runs" / "r.jsonl"
    argv = ["--digits", "1", "--model", "tiny", "--steps", "10", "--batch-size", "16", "--rollouts", "8", "16",
            "--method", "cross_entropy", "sage", "--seed", "0", "1", "--tau", "0.3", "--record", str(file)]
    assert main(argv) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 6 and len(select(lines, method="sage", rollouts=16)) == 2  # cross-entropy has no rollouts
    line = select(lines, method="sage", rollouts=8, seed=1)[0]
    assert line["config"]["advantage_params"] == {"tau": 0.3} and line["config"]["data"] == "digits"
    assert line["curve"]["step"] == [5, 10] and len(line["curve"]["pass_rate"]) == 2
    assert {"test_top1", "test_loss", "test_pass@1", "test_pass@128", "step"} == set(line["tests"][-1])
    assert line["command"].startswith("python -m sage_lite.vision_train --digits 1") and "torch" in line["versions"]
    assert str(tmp_path) not in file.read_text() and "--record runs/r.jsonl" in line["command"]
    capsys.readouterr()
    assert main(argv) == 0  # again: nothing is run twice
    assert capsys.readouterr().out.count("already recorded") == 6 and len(file.read_text().splitlines()) == 6


def test_command_says_what_is_wrong_in_a_line(capsys):
    assert main(["--digits", "7"]) == 2
    assert re.fullmatch(r"error: digits must be .*\n", capsys.readouterr().err)
    assert main(["--method", "sage", "grpo", "--out", "x"]) == 2
    assert "use record" in capsys.readouterr().err


RECORD = ["--digits", "1", "--model", "tiny", "--steps", "5", "--batch-size", "16", "--rollouts", "8"]


def test_a_half_line_in_the_record_file_is_cut_and_a_run_given_twice_runs_once(tmp_path, capsys):
    file = tmp_path / "r.jsonl"
    assert main([*RECORD, "--seed", "0", "0", f"--record={file}"]) == 0
    assert "already recorded" in capsys.readouterr().out
    whole = file.read_text()
    assert whole.count("\n") == 1 and str(tmp_path.parent) not in whole
    file.write_text(whole + whole[:100])  # killed while it wrote the second
    assert main([*RECORD, "--seed", "0", "1", f"--record={file}"]) == 0
    assert [json.loads(line)["config"]["seed"] for line in file.read_text().splitlines()] == [0, 1]


def test_a_record_file_that_cannot_be_one_is_said_before_the_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sage_lite.vision_train.train", lambda *_: pytest.fail("trained"))
    (tmp_path / "foreign.jsonl").write_text('{"step": 1}\n[1]\n')
    for name, message in (("foreign.jsonl", "holds other lines"), ("", "cannot write the record file")):
        assert main([*RECORD, "--record", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_a_resumed_run_is_recorded_whole(tmp_path):
    out, file = tmp_path / "run", tmp_path / "r.jsonl"
    argv = [*RECORD, "--steps", "10", "--checkpoint-every", "5", "--out", str(out)]
    assert main(argv) == 0
    shutil.rmtree(out / "checkpoints" / "step-000010")
    assert main([*argv, "--resume", "--record", str(file)]) == 0
    line = json.loads(file.read_text())
    assert line["curve"]["step"] == [5, 10] and line["steps"] == 10 and line["cpu_seconds"] is None


def test_the_command_ends_with_130_after_ctrl_c_and_1_after_a_diverged_run(capsys, monkeypatch):
    stopped = VisionResult(None, [{}] * 3, 0.0, True)
    monkeypatch.setattr("sage_lite.vision_train.train", lambda *_: stopped)
    assert main([*RECORD, "--method", "sage", "grpo"]) == 130
    assert capsys.readouterr().out == "sage, 8 rollouts, seed 0: stopped after step 3; not recorded\n"
    monkeypatch.undo()
    assert main([*RECORD, "--method", "sign", "cross_entropy", "--steps", "20", "--lr", "1e12"]) == 1
    assert "diverged" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "message"), [
    (["--method", "sage", "grpoo"], "grpoo"), (["--method", "sage", "reinforce", "--rollouts", "0"], "group_size"),
    (["--tau", "0"], "tau"), (["--method", "grpo", "--tau", "0.3"], "SAGE's temperature"),
    (["--preset", "imagenet64"], "needs --data"), (["--method", "sage", "grpo", "--out", "x"], "one run"),
])
def test_bad_arguments_end_with_2_before_anything_is_trained(more, message, capsys, monkeypatch):
    monkeypatch.setattr("sage_lite.vision_train.train", lambda *_: pytest.fail("trained"))
    assert main([*RECORD, *more]) == 2
    assert message in capsys.readouterr().err


def test_help_runs_as_a_module():
    import subprocess

    done = subprocess.run([sys.executable, "-m", "sage_lite.vision_train", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--match-size" in done.stdout and "--record" in done.stdout


def test_curves_and_the_step_at_which_a_run_leaves():
    metrics = [{"step": s, "pass_rate": 0.001 * s, "top1": 0.5} for s in range(1, 14)]
    means = curve(metrics)
    assert means == {"step": [5, 10], "pass_rate": [0.003, 0.008], "top1": [0.5, 0.5]}
    assert leaves_at(means, 2000) == 10 and leaves_at(means, 1000) == math.inf  # (0.003 + 0.008) / 2 against 10 / 2000
    lucky = {"step": [5, 10, 15, 20, 25, 30], "pass_rate": [0.001, 0.001, 0.001, 0.001, 0.03, 0.001]}
    assert leaves_at(lucky, 1000) == math.inf


def test_predicted_leave_is_the_reference_stretched_by_one_over_p_w():
    reference = {"step": [5, 10, 15, 20], "pass_rate": [0.001, 0.002, 0.02, 0.5]}
    assert predicted_leave(reference, "reinforce", 16, 1000) == pytest.approx(5000 + 2500 + 250 + 10)
    maxrl = predicted_leave(reference, "maxrl", 4096, 1000)
    assert maxrl == pytest.approx(sum(5 / (1 - (1 - p) ** 4095) for p in (0.001, 0.002, 0.02, 0.5)))
    assert predicted_leave({"step": [5], "pass_rate": [0.001]}, "sage", 16, 1000) == math.inf
    table = theory.binary_table("rloo", 16)
    assert predicted_leave(reference, table, 16, 1000) == pytest.approx(7760)
    assert vision.relative_speed(table, 0.25, 16) == pytest.approx(0.25)


@pytest.mark.parametrize("method", ["reinforce", "grpo", "sage"])
def test_the_clock_is_exact_for_small_steps_without_noise_on_one_image(method):
    """One row of logits, 25 classes, plain gradient steps: the method walks cross-entropy's path, at p w(p)."""
    curves, classes, label, table = {}, 25, torch.tensor([3]), theory.binary_table(method, 8)
    losses = {"cross_entropy": torch.nn.functional.cross_entropy,
              method: lambda z, y: vision.expected_label_loss(z, y, 8, table)}
    for name, loss in losses.items():
        z, metrics = torch.zeros(1, classes, dtype=torch.float64, requires_grad=True), []
        while not metrics or leaves_at(curves[name], classes) == math.inf:  # until p is 10 / 25
            for _ in range(5):
                pass_rate = z.detach().softmax(-1)[0, 3].item()
                metrics.append({"step": len(metrics) + 1, "pass_rate": pass_rate, "top1": 0.0})
                z.data -= 0.02 * torch.autograd.grad(loss(z, label), z)[0]
            curves[name] = curve(metrics)
    found = leaves_at(curves[method], classes)
    assert found == pytest.approx(predicted_leave(curves["cross_entropy"], table, 8, classes), rel=0.05)
    assert abs(found / leaves_at(curves["cross_entropy"], classes) - 1) > 0.1


def test_interval_over_seeds():
    found = mean_interval([0.4, 0.5, 0.6])
    assert found.value == pytest.approx(0.5)
    assert found.high - 0.5 == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert 0.5 - found.low == pytest.approx(found.high - 0.5)
    assert mean_interval([0.0, 0.01]).low == 0.0 and mean_interval([1.0, 0.9]).high == 1.0
    with pytest.raises(UserError, match="at least two"):
        mean_interval([0.1])
