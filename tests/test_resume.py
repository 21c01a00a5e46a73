"""A run's folder and how a run may end: held by one run, saved when a step fails, clear about disks and settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
from small_models import small_policy
from test_trainer import _config, _numbers, _task, _weights

from sage_lite import checkpoint, folders, trainer
from sage_lite.errors import UserError
from sage_lite.policy import load_policy
from sage_lite.resume import stop_on_interrupt
from sage_lite.runlog import CompletionsFile, MetricsFile, read_lines
from sage_lite.trainer import train

# -- one run at a time -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(folders.fcntl is None, reason="no locks here")
def test_a_second_run_in_the_same_folder_is_refused_until_the_first_has_ended(tmp_path, monkeypatch):
    out, met, plain = str(tmp_path / "run"), [], trainer.update

    def meanwhile(*arguments, **options):
        for resume in (False, True) if folders.latest(tmp_path / "run" / "checkpoints") else (False,):
            with pytest.raises(UserError, match="another run is writing to .*run"):
                train(_config(out=out, resume=resume), small_policy(), _task())
            met.append(resume)
        return plain(*arguments, **options)

    monkeypatch.setattr(trainer, "update", meanwhile)
    assert len(train(_config(out=out), small_policy(), _task()).metrics) == 4
    assert met == [False, False, False, True, False, True]
    monkeypatch.undo()
    assert len(train(_config(out=out, resume=True, steps=5), small_policy(), _task()).metrics) == 1


@pytest.mark.skipif(folders.fcntl is None, reason="no locks here")
def test_a_classifiers_run_holds_its_folder_too(tmp_path):
    from sage_lite import vision_loop

    config = vision_loop.VisionConfig(digits=1, model="tiny", batch_size=16, steps=1, out=str(tmp_path))
    with folders.run_folder(tmp_path, False), pytest.raises(UserError, match="another run is writing"):
        vision_loop.train(config)
    assert len(vision_loop.train(config).metrics) == 1


@pytest.mark.skipif(folders.fcntl is None, reason="no locks here")
def test_another_process_is_refused_too_and_a_fork_does_not_keep_the_lock(tmp_path):
    with folders.run_folder(tmp_path, False):
        command = ["-c", "import sys; from sage_lite import folders\nwith folders.run_folder(sys.argv[1], False): pass"]
        done = subprocess.run([sys.executable, *command, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 1 and "another run is writing" in done.stderr
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # holds the open file until the parent has tried
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with folders.run_folder(tmp_path, False):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


@pytest.mark.parametrize("error", [RuntimeError("sampling"), KeyboardInterrupt()])
def test_a_run_that_fails_gives_its_folder_back(error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(trainer, "sample", fail)
    with pytest.raises(type(error)):
        train(_config(out=str(tmp_path)), small_policy(), _task())
    monkeypatch.undo()
    assert len(train(_config(out=str(tmp_path)), small_policy(), _task()).metrics) == 4


# -- an end that nobody asked for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["sample", "score"])
def test_when_a_step_fails_the_steps_before_it_are_saved(where, tmp_path, monkeypatch):
    whole = train(_config(steps=6, out=str(tmp_path / "whole")), small_policy(), _task())
    task, calls = _task(), []

    def failing(plain, limit):
        def call(*arguments, **options):
            calls.append(1)
            if len(calls) > limit:
                raise (KeyError("grader") if where == "sample" else UserError("all failed"))
            return plain(*arguments, **options)

        return call

    name = "sample" if where == "sample" else "score_all"
    monkeypatch.setattr(trainer, name, failing(getattr(trainer, name), 3))
    config = dict(steps=6, checkpoint_every=50, out=str(tmp_path / "run"))
    with pytest.warns(UserWarning, match="step 4 failed; all before it is saved in .*step-000003"):
        with pytest.raises((KeyError, UserError), match="grader|all failed"):
            train(_config(**config), small_policy(), task)
    monkeypatch.undo()
    rest = train(_config(resume=True, **config), small_policy(seed=5), _task())
    assert _numbers(read_lines(tmp_path / "run" / "metrics.jsonl")) == _numbers(whole.metrics)
    assert torch.equal(_weights(rest.policy), _weights(whole.policy))


def test_a_failed_rescue_does_not_hide_the_failure(tmp_path, monkeypatch):
    plain, calls = trainer.sample, []

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the real one")
        return plain(*arguments, **options)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "sample", fail)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.warns(UserWarning, match="step 2 failed, and could not write the checkpoint of step 1.*No space"):
        with pytest.raises(KeyError, match="the real one"):
            train(_config(out=str(tmp_path)), small_policy(), _task())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_handlers_come_back(number):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_interrupt() as interrupted:
        assert not interrupted.is_set()
        signal.raise_signal(number)
        assert interrupted.is_set()
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    with stop_on_interrupt():
        pass
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


# -- folders and disks -----------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_to_is_said_before_the_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "load_policy", lambda *_, **__: pytest.fail("the weights were loaded"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "x", "/dev/null/x"):
        with pytest.raises(UserError, match="cannot write to the folder"):
            train(_config(out=str(out)), task=_task())


def test_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    result = train(_config(steps=1, out="~/run"), small_policy(), _task())
    assert result.out == tmp_path / "run" and (tmp_path / "run" / "metrics.jsonl").is_file()
    assert load_policy("~/run", device="cpu").source == str(tmp_path / "run" / "checkpoints" / "step-000001")


def test_what_failed_before_it_began_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        train(_config(out=str(tmp_path / "a"), resume=True), small_policy(), _task())
    with pytest.raises(UserError, match="could not load"):
        with folders.run_folder(tmp_path / "b", False):
            load_policy("some-owner/some-model", device="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_stays_the_error_when_the_file_is_closed(tmp_path):
    with pytest.raises(UserError, match="No space left"):
        with MetricsFile(tmp_path, 0) as log:
            log.file.close()
            log.file = open("/dev/full", "w")
            log.write({"step": 1})
    with pytest.raises(UserError, match="could not write"):
        CompletionsFile(tmp_path / "nowhere", 0)


def test_weights_that_do_not_fit_the_disk_are_a_clear_error(tmp_path):
    """safetensors raises errors of its own, which are no OSErrors."""
    resource = pytest.importorskip("resource")
    policy = small_policy()
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(UserError, match="could not write the checkpoint of step 1 .*There is no checkpoint"):
            checkpoint.save_checkpoint(tmp_path / "checkpoints", 1, policy, optimizer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "checkpoints").iterdir())


# -- what a resumed run knows ----------------------------------------------------------------------------------------


def test_other_training_data_is_another_run(tmp_path):
    train(_config(out=str(tmp_path)), small_policy(), _task())
    task = _task()
    task.train[3] = {"n": 99}
    with pytest.raises(UserError, match="training_data was '12 rows, sha256 .*' and is now '12 rows, sha256"):
        train(_config(out=str(tmp_path), resume=True, steps=5), small_policy(), task)
    with pytest.raises(UserError, match="is now '11 rows"):
        train(_config(out=str(tmp_path), resume=True, steps=5), small_policy(), _task(11))
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("training_data")  # as older runs have it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(train(_config(out=str(tmp_path), resume=True, steps=5), small_policy(), _task()).metrics) == 1


def test_rows_that_json_does_not_know_have_the_same_digest_in_every_process(tmp_path):
    for resume, steps in ((False, 1), (True, 2)):
        task = _task()
        task.train[0]["picture"] = object()
        train(_config(out=str(tmp_path), resume=resume, steps=steps), small_policy(), task)


def test_a_run_that_is_there_already_says_so(tmp_path):
    train(_config(out=str(tmp_path)), small_policy(), _task())
    with pytest.raises(UserError, match="is at step 4 already: give more than steps=2"):
        train(_config(out=str(tmp_path), resume=True, steps=2), small_policy(), _task())
    with pytest.warns(UserWarning, match="is at step 4 already, and nothing is left to do"):
        assert train(_config(out=str(tmp_path), resume=True), small_policy(), _task()).metrics == []


def test_small_numbers_keep_their_digits_and_what_json_does_not_have_is_null(tmp_path):
    with MetricsFile(tmp_path, 0) as log:
        kept = log.write({"step": 1, "lr": 1e-6 / 3, "kl": float("nan"), "ratio_max": float("inf")})
    assert kept["lr"] == 3.3333333e-07 and kept["ratio_max"] == float("inf")
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "lr": 3.3333333e-07, "kl": None, "ratio_max": None}
    assert "NaN" not in text and "Infinity" not in text


def test_a_context_that_no_prompt_fits_is_not_answered_with_a_negative_number():
    with pytest.raises(UserError, match="context of 256: lower max_new_tokens$"):
        train(_config(max_new_tokens=1000), small_policy(), _task())


# -- a run's folder as a model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [0, 2])
def test_a_runs_folder_is_its_last_checkpoint(lora, tmp_path):
    small_policy().save(tmp_path / "model")
    run, options = tmp_path / "run", dict(steps=1, batch_size=2, device="cpu", dtype="float32")
    done = train(_config(model=str(tmp_path / "model"), lora=lora, out=str(run), **options), task=_task())
    policy = load_policy(run, device="cpu", dtype="float32")
    assert torch.equal(_weights(policy), _weights(done.policy))
    if lora:
        on_top = load_policy(tmp_path / "model", adapter=run, device="cpu", dtype="float32")
        assert torch.equal(_weights(on_top), _weights(done.policy))
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        further = train(_config(model=str(run), out=str(tmp_path / "next"), **options), task=_task(), say=said.append)
    assert further.policy.is_adapter == bool(lora) and "step-000001" in said[0]
    assert ("LoRA of rank 2" if lora else "all weights") in said[0]


def test_a_run_without_a_checkpoint_is_no_model_yet(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text('{"method": "sage", "dtype": "auto"}')
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_policy(tmp_path, device="cpu")
