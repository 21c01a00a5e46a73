from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from small_models import small_policy

from sage_lite import checkpoint, trainer
from sage_lite.errors import Diverged, UserError
from sage_lite.runlog import MetricsFile, read_lines
from sage_lite.tasks import Task
from sage_lite.trainer import TrainConfig, batch_indices, learning_rate, schedule_factor, train

NAN, INF = float("nan"), float("inf")
VARYING = {"seconds", "rollout_s", "tokens_per_s"}


def _task(rows: int = 12) -> Task:
    """Reward: is the code of the completion's first character even? Half of them are, from any start."""
    rows_ = [{"n": i} for i in range(rows)]
    return Task("first-letter", rows_, rows_[:4], {"short": lambda r: f"{r['n']} ="},
                lambda text, row: float(bool(text) and ord(text[0]) % 2 == 0), lambda row: None,
                max_new_tokens={"short": 6})  # fmt: skip


def _config(**changes) -> TrainConfig:
    base = dict(
        steps=4, batch_size=4, group_size=4, lr=1e-3, progress=False, checkpoint_every=2, log_completions_every=2
    )
    return TrainConfig(**(base | changes))


def _numbers(lines):
    return [{k: v for k, v in line.items() if k not in VARYING} for line in lines]


def _weights(policy):
    return torch.cat([p.detach().flatten() for _, p in policy.trainable()])


def test_training_moves_the_model_and_logs_every_step(tmp_path):
    policy = small_policy()
    before = _weights(policy).clone()
    result = train(_config(out=str(tmp_path / "run")), policy, _task())
    assert not torch.equal(before, _weights(policy))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines == result.metrics
    wanted = {
        "reward",
        "pass_rate",
        "dead_groups",
        "kl",
        "clip_share",
        "tokens_per_s",
        "loss",
        "grad_norm",
        "lr",
        "cut_off",
    }
    assert wanted <= set(lines[0])
    shown = read_lines(tmp_path / "run" / "completions.jsonl")
    assert [s["step"] for s in shown] == [2] * 4 + [4] * 4 and {"prompt", "completion", "reward", "advantage"} <= set(
        shown[0]
    )


def test_training_raises_the_reward():
    result = train(_config(steps=40, batch_size=12, group_size=8, lr=5e-3), small_policy(), _task())
    rewards = [line["reward"] for line in result.metrics]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.1


def test_same_seed_same_numbers_other_seed_other_numbers():
    a, b, c = (train(_config(seed=s), small_policy(), _task()).metrics for s in (0, 0, 1))
    assert _numbers(a) == _numbers(b) and _numbers(a) != _numbers(c)


@pytest.mark.parametrize(
    "method", ["sage", "grpo", "dr_grpo", "dapo", "cispo", "f_grpo", "maxrl", "rloo", "sign", "reinforce"]
)
def test_every_recipe_trains(method):
    result = train(_config(method=method, steps=2), small_policy(), _task())
    assert all(line["grad_norm"] > 0 and line["loss"] == line["loss"] for line in result.metrics)


def test_resume_equals_a_run_that_was_never_stopped(tmp_path):
    whole = train(_config(steps=6, out=str(tmp_path / "whole")), small_policy(), _task())
    train(_config(steps=3, checkpoint_every=3, out=str(tmp_path / "parts")), small_policy(), _task())
    # The second half starts from other weights on purpose: everything must come from the checkpoint.
    rest = train(_config(steps=6, out=str(tmp_path / "parts"), resume=True), small_policy(seed=9), _task())
    assert _numbers(read_lines(tmp_path / "parts" / "metrics.jsonl")) == _numbers(whole.metrics)
    assert torch.equal(_weights(rest.policy), _weights(whole.policy))


def test_resume_drops_lines_after_the_checkpoint_and_half_lines(tmp_path):
    out = tmp_path / "run"
    whole = train(_config(steps=6, out=str(tmp_path / "whole")), small_policy(), _task())
    train(_config(steps=5, checkpoint_every=4, out=str(out)), small_policy(), _task())
    import shutil

    shutil.rmtree(out / "checkpoints" / "step-000005")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    train(_config(steps=6, checkpoint_every=4, out=str(out), resume=True), small_policy(), _task())
    assert _numbers(read_lines(out / "metrics.jsonl")) == _numbers(whole.metrics)


def test_resume_as_another_run_is_refused(tmp_path):
    train(_config(out=str(tmp_path)), small_policy(), _task())
    with pytest.raises(UserError, match="lr was 0.001 and is now 0.01"):
        train(_config(out=str(tmp_path), resume=True, lr=0.01), small_policy(), _task())
    with pytest.raises(UserError, match="already holds a run"):
        train(_config(out=str(tmp_path)), small_policy(), _task())
    with pytest.raises(UserError, match="nothing to resume"):
        train(_config(out=str(tmp_path / "new"), resume=True), small_policy(), _task())


_CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from test_trainer import _config, _task
from small_models import small_policy
from sage_lite.trainer import train
result = train(_config(steps=400, checkpoint_every=3, out=sys.argv[1]), small_policy(), _task())
print("stopped early" if result.stopped_early else "done", len(result.metrics), flush=True)
"""


def _start_child(out):
    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(here), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(out), here], env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while len(read_lines(out / "metrics.jsonl")) < 7:
        assert child.poll() is None and time.time() < deadline
        time.sleep(0.01)
    return child


def test_kill_9_loses_at_most_the_steps_since_the_last_checkpoint(tmp_path):
    out = tmp_path / "run"
    child = _start_child(out)
    child.kill()
    child.wait()
    seen = len(read_lines(out / "metrics.jsonl"))
    last = checkpoint.latest(out / "checkpoints")
    assert last is not None and int(last.name[5:]) >= seen - 3
    steps = seen + 3
    (out / ".left-over").mkdir()
    train(_config(steps=steps, checkpoint_every=3, out=str(out), resume=True), small_policy(seed=5), _task())
    whole = train(_config(steps=steps), small_policy(), _task())
    assert _numbers(read_lines(out / "metrics.jsonl")) == _numbers(whole.metrics)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_finish_saves_and_returns(number, tmp_path):
    out = tmp_path / "run"
    child = _start_child(out)
    child.send_signal(number)
    printed, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and "stopped early" in printed
    lines = read_lines(out / "metrics.jsonl")
    assert checkpoint.latest(out / "checkpoints").name == f"step-{lines[-1]['step']:06d}"


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    policy, optimizer = small_policy(), None
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable()])
    checkpoint.save_checkpoint(tmp_path, 1, policy, optimizer, {})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="No space left.*last whole checkpoint is step-000001"):
        checkpoint.save_checkpoint(tmp_path, 2, policy, optimizer, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001"]
    monkeypatch.undo()
    damaged = checkpoint.save_checkpoint(tmp_path, 3, policy, optimizer, {})
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.warns(UserWarning, match="incomplete"):
        assert checkpoint.latest(tmp_path).name == "step-000001"


def test_only_the_newest_checkpoints_stay_and_hold_no_pickle(tmp_path):
    train(_config(steps=8, checkpoint_every=2, keep_checkpoints=2, out=str(tmp_path)), small_policy(), _task())
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000006", "step-000008"]
    kinds = {p.suffix for p in (tmp_path / "checkpoints" / "step-000008").iterdir()}
    assert kinds <= {".json", ".safetensors", ".jinja", ".txt"}


def test_lora_run_resumes_too(tmp_path):
    from sage_lite.policy import load_policy

    small_policy().save(tmp_path / "base")
    options = dict(model=str(tmp_path / "base"), lora=2, beta=0.01, device="cpu", dtype="float32")
    whole = train(_config(steps=4, **options), task=_task())
    train(_config(steps=2, out=str(tmp_path / "run"), **options), task=_task())
    rest = train(_config(steps=4, out=str(tmp_path / "run"), resume=True, **options), task=_task())
    assert _numbers(read_lines(tmp_path / "run" / "metrics.jsonl")) == _numbers(whole.metrics)
    assert rest.metrics[-1]["kl"] > 0
    again = load_policy(tmp_path / "run" / "checkpoints" / "step-000004", device="cpu")
    assert torch.equal(_weights(again), _weights(rest.policy))


def test_a_full_disk_is_noticed_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="MB are free"):
        train(_config(out=str(tmp_path)), small_policy(), _task())


def test_a_metrics_file_that_cannot_be_written_says_so(tmp_path):
    log = MetricsFile(tmp_path, 0)
    log.file.close()
    log.file = open("/dev/full", "w") if os.path.exists("/dev/full") else pytest.skip("no /dev/full here")
    with pytest.raises(UserError, match="No space left"):
        log.write({"step": 1})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"group_size": 1}, "group_size=1 leaves sage nothing"),
        ({"method": "gropo"}, "unknown method 'gropo'"),
        ({"advantage_params": {"tau": -1}}, "tau"),
        ({"temperature": 0.0}, "temperature"),
        ({"schedule": "step"}, "schedule"),
        ({"beta": -0.1}, "beta must be a finite number of at least 0, got -0.1"),
        ({"beta": NAN}, "beta"),
        ({"beta": 0.1}, "no reference was kept"),
        ({"grad_clip": -1}, "grad_clip must be a finite number of at least 0, got -1"),
        ({"grad_clip": NAN}, "grad_clip"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, got -1"),
        ({"lr": INF}, "lr must be a finite number above 0, got inf"),
        ({"lr": "1e-4"}, "lr must be .* got '1e-4'"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"temperature": NAN}, "temperature"),
        ({"top_p": 0}, "top_p must be a finite number above 0, got 0"),
        ({"top_p": 2}, "top_p must be at most 1, got 2"),
        ({"dtype": "foo"}, "unknown dtype 'foo'; choose auto, float32"),
        ({"dtype": ["float32"]}, "dtype must be a text"),
        ({"advantage_params": []}, "advantage_params must be a dictionary"),
        ({"advantage_params": {"tau": "a"}}, "tau"),
        ({"task_options": []}, "task_options must be a dictionary"),
        ({"steps": "10"}, "steps must be a whole number of at least 1, got '10'"),
        ({"group_size": 8.0}, "group_size must be a whole number .* got 8.0"),
        ({"seed": None}, "seed"),
        ({"seed": 2**63}, "seed must be below"),
        ({"minibatches": 1.5}, "minibatches"),
        ({"minibatches": 5}, "minibatches=5 are more than the batch_size=4"),
        ({"lora": -1}, "lora"),
        ({"progress": "no"}, "progress must be True or False, got 'no'"),
        ({"out": 3}, "out must be a text, got 3"),
        ({"max_new_tokens": 10_000}, "context of 256"),
        ({"resume": True}, "needs out"),
    ],
)
def test_bad_settings_fail_before_the_first_step(change, message):
    with pytest.raises(UserError, match=message):
        train(_config(**change), small_policy(), _task())


@pytest.mark.parametrize("options", [{"pool_size": "a"}, {"name": "gsm8k"}])
def test_task_options_of_the_wrong_kind_are_one_clear_line(options):
    with pytest.raises(UserError, match="task_options=.* do not fit the task countdown"):
        train(_config(task_options=options), small_policy())


def test_every_setting_says_what_it_is():
    for setting in dataclasses.fields(TrainConfig):
        assert setting.metadata["help"], setting.name
        assert all(choice in setting.metadata["help"] for choice in setting.metadata.get("choices", ()))


def test_all_weights_are_not_trained_in_sixteen_bits(tmp_path):
    half = small_policy()
    half.model.half()
    for policy in (half, None):
        with pytest.raises(UserError, match="float16 is too narrow"):
            train(_config(dtype="float16", out=str(tmp_path / "run")), policy, _task())
    assert not (tmp_path / "run").exists()
    small_policy().save(tmp_path / "model")
    one = dict(steps=1, batch_size=2, model=str(tmp_path / "model"), device="cpu")
    with pytest.warns(UserWarning, match="bfloat16"):
        train(_config(dtype="bfloat16", **one), task=_task())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = train(_config(dtype="bfloat16", lora=2, **one), task=_task())
    assert len(result.metrics) == 1


@pytest.mark.parametrize(("factor", "message"), [
    (NAN, "no longer finite since step 3"), (1e30, "step 4: the model's probabilities are not finite")
])
def test_a_model_that_broke_is_said_and_not_saved(factor, message, tmp_path, monkeypatch):
    """Weights that are not finite; and finite ones so large that the logits overflow."""
    plain, calls = trainer.update, []

    def breaking(policy, *arguments, **options):
        numbers = plain(policy, *arguments, **options)
        calls.append(1)
        if len(calls) == 3:
            for _, parameter in policy.trainable():
                parameter.data.mul_(factor)
        return numbers

    monkeypatch.setattr(trainer, "update", breaking)
    with pytest.raises(Diverged, match=f"{message}.* last whole checkpoint is step-000002"):
        train(_config(out=str(tmp_path)), small_policy(), _task())
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    calls.clear()
    with pytest.raises(Diverged, match=f"{message}.* There is no checkpoint"):
        train(_config(), small_policy(), _task())


def test_an_empty_task_is_refused():
    with pytest.raises(UserError, match="no training problem"):
        train(_config(), small_policy(), _task(0))


def test_a_reward_that_fails_costs_its_rollout_not_the_run():
    task = _task()
    score, calls = task.score, iter(range(10**6))
    task.score = lambda text, row: None if next(calls) % 5 == 0 else score(text, row)
    result = train(_config(steps=2), small_policy(), task)
    assert all(line["failed_rewards"] > 0 and line["reward"] == line["reward"] for line in result.metrics)
    task.score = lambda text, row: 1 / 0
    with pytest.raises(UserError, match="ZeroDivisionError"):
        train(_config(steps=2), small_policy(), task)


def test_nothing_moves_a_model_without_a_signal():
    task = _task()
    task.score = lambda text, row: 1.0
    policy = small_policy()
    before = _weights(policy).clone()
    result = train(_config(weight_decay=0.1), policy, task)
    assert torch.equal(before, _weights(policy))
    assert all(line["dead_groups"] == 1.0 and line["optimizer_steps"] == 0 for line in result.metrics)


def test_batches_cover_every_row_once_an_epoch_and_run_over_its_end():
    picked = [i for step in range(5) for i in batch_indices(10, 4, step, seed=3)]
    assert sorted(picked[:10]) == sorted(picked[10:]) == list(range(10)) and picked[:10] != picked[10:]
    assert batch_indices(3, 8, 0, seed=0) == batch_indices(3, 8, 0, seed=0)
    assert batch_indices(1000, 8, 0, seed=0) != batch_indices(1000, 8, 0, seed=1)


def test_learning_rate_rule_and_schedules():
    policy = small_policy()
    weights = sum(p.numel() for p in policy.model.parameters())
    assert learning_rate(TrainConfig(), policy) == pytest.approx(2e-4 * (1e6 / weights) ** 0.5)
    assert learning_rate(TrainConfig(lr=3e-5), policy) == 3e-5
    config = TrainConfig(steps=10, schedule="linear", warmup_steps=4)
    assert [round(schedule_factor(config, s), 3) for s in (0, 4, 5, 9)] == [0.2, 0.6, 0.5, 0.1]
    assert schedule_factor(TrainConfig(steps=10, schedule="cosine"), 5) == pytest.approx(0.5)


def test_config_file_tells_the_whole_run(tmp_path):
    train(_config(out=str(tmp_path)), small_policy(), _task())
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 1e-3


def test_a_seed_gives_the_same_weights_with_several_threads():
    """Without a fixed order of sums two threads differ in the last bits, and training amplifies them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = [train(TrainConfig(steps=4, progress=False)) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()  # as it was before
    for run in runs[1:]:
        assert run.metrics[-1]["grad_norm"] == runs[0].metrics[-1]["grad_norm"]
        for (name, a), (_, b) in zip(runs[0].policy.trainable(), run.policy.trainable()):
            assert a.equal(b), name
