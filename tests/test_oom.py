from __future__ import annotations

import warnings

import pytest
import torch
from small_models import small_policy
from test_trainer import _config, _numbers, _task
from test_update import _batch, _close, _gradient

from sage_lite.errors import UserError
from sage_lite.oom import Limit, is_out_of_memory
from sage_lite.rollout import sample
from sage_lite.runlog import read_lines
from sage_lite.trainer import train

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: not enough memory: you tried to allocate"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
]


def test_only_lack_of_memory_is_taken_for_it():
    assert all(is_out_of_memory(error) for error in [*ERRORS, MemoryError()])
    assert not is_out_of_memory(RuntimeError("The size of tensor a (3) must match"))
    assert not is_out_of_memory(ValueError("out of memory"))

    def work(size):
        raise RuntimeError("shapes differ")

    limit = Limit("micro_batch_tokens", 8)
    with pytest.raises(RuntimeError, match="shapes differ"):
        limit.run(work, whole=8)
    assert limit.value == 8


def test_it_is_halved_from_what_there_is_until_it_fits_and_said_once():
    tried, limit = [], Limit("rollout_batch", 10**6)

    def work(size):
        tried.append(size)
        if size > 5:
            raise ERRORS[0]
        return size

    with pytest.warns(UserWarning) as said:
        assert limit.run(work, whole=40) == 5
    assert tried == [10**6, 20, 10, 5] and limit.value == 5
    assert len(said) == 1 and "rollout_batch=1000000" in str(said[0].message) and "5" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert limit.run(work, whole=40) == 5  # it stays there


def test_what_cannot_be_made_smaller_is_an_error_that_says_so():
    def work(size):
        raise ERRORS[0]

    with pytest.raises(UserError, match="out of memory even with micro_batch_tokens=30.*Tried to allocate"):
        Limit("micro_batch_tokens", 1000).run(work, whole=200, least=30)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("share", [True, False])
def test_after_recovery_the_gradient_is_the_full_one(error, share):
    """The second micro-batch fails in the middle of its backward pass, when part of its gradient is there already."""
    policy = small_policy()
    rollouts, rewards = _batch(policy)
    wanted, before = _gradient(policy, rollouts, rewards, share_prompts=share)
    names = dict(policy.trainable())
    early, late = names["model.layers.0.mlp.up_proj.weight"], names["model.layers.1.mlp.up_proj.weight"]
    calls, left_behind = [], []

    def fail(gradient):
        calls.append(1)
        if len(calls) == 2:
            left_behind.append(late.grad.clone())
            raise error

    hook = early.register_hook(fail)
    limit = Limit("micro_batch_tokens", 70)
    with pytest.warns(UserWarning, match="micro_batch_tokens=70: it goes on with 35"):
        found, numbers = _gradient(policy, rollouts, rewards, share_prompts=share, micro_batch_tokens=limit)
    hook.remove()
    assert left_behind[0].norm() > 0 and limit.value == 35
    _close(found, wanted)
    for key in ("loss", "clip_share", "kl", "ratio_max", "grad_norm"):
        assert numbers[key] == pytest.approx(before[key], abs=1e-5)


@pytest.mark.parametrize("name", ["reference", "old"])
def test_the_passes_without_gradient_recover_too(name):
    policy, options = small_policy(), {"beta": 0.1} if name == "reference" else {"minibatches": 2}
    policy.reference_model = small_policy(seed=1).model
    rollouts, rewards = _batch(policy)

    def gradient(**more):
        return _gradient(policy, rollouts, rewards, generator=torch.Generator().manual_seed(0), **options, **more)[0]

    wanted, failed = gradient(), []
    model = policy.reference_model if name == "reference" else policy.model

    def fail(*_):
        if not torch.is_grad_enabled() and not failed:
            failed.append(1)
            raise ERRORS[0]

    hook = model.get_decoder().register_forward_pre_hook(fail)
    with pytest.warns(UserWarning, match="out of memory"):
        found = gradient(micro_batch_tokens=150)
    hook.remove()
    assert failed
    _close(found, wanted)


def _refuse_more_rows_than(policy, rows):
    def fail(_, args, kwargs):
        if kwargs["input_ids"].shape[0] > rows:
            raise ERRORS[1]

    return policy.causal_lm.get_decoder().register_forward_pre_hook(fail, with_kwargs=True)


def test_rollouts_go_on_with_half_as_many_in_the_same_order():
    policy = small_policy()
    prompts = policy.encode([f"{i} {'9 ' * (5 - i)}=" for i in range(5)])
    greedy = sample(policy, prompts, 4, max_new_tokens=5, temperature=0.0)
    hook = _refuse_more_rows_than(policy, 3)
    limit = Limit("rollout_batch", 1000)
    with pytest.warns(UserWarning, match="rollout_batch=1000") as said:
        again = sample(policy, prompts, 4, max_new_tokens=5, temperature=0.0, rollout_batch=limit)
    assert len(said) == 1 and limit.value < 20 and again.texts == greedy.texts
    draws = []
    for _ in range(2):
        with pytest.warns(UserWarning):
            draws.append(sample(policy, prompts, 4, max_new_tokens=5, generator=torch.Generator().manual_seed(1)).texts)
    hook.remove()
    assert draws[0] == draws[1] and len(set(draws[0])) > 5
    hook = _refuse_more_rows_than(policy, 0)
    with pytest.raises(UserError, match="even with rollout_batch=1,"):
        sample(policy, prompts, 4, max_new_tokens=5)
    hook.remove()


def test_a_run_goes_on_says_so_once_and_resumes_with_what_fitted(tmp_path):
    policy = small_policy()
    hook = _refuse_more_rows_than(policy, 6)
    config = dict(batch_size=4, group_size=4, checkpoint_every=2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        whole = train(_config(steps=4, out=str(tmp_path / "whole"), **config), policy, _task())
    hook.remove()
    assert sum("rollout_batch" in str(w.message) for w in said) == 1 and len(whole.metrics) == 4
    # Another machine, with more memory: the run is the same one all the same.
    policy = small_policy()
    hook = _refuse_more_rows_than(policy, 6)
    with pytest.warns(UserWarning, match="rollout_batch"):
        train(_config(steps=2, out=str(tmp_path / "parts"), **config), policy, _task())
    hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(_config(steps=4, out=str(tmp_path / "parts"), resume=True, **config), small_policy(seed=3), _task())
    assert _numbers(read_lines(tmp_path / "parts" / "metrics.jsonl")) == _numbers(whole.metrics)


def test_memory_settings_may_change_in_a_resumed_run(tmp_path):
    train(_config(steps=2, out=str(tmp_path)), small_policy(), _task())
    changed = dict(micro_batch_tokens=64, rollout_batch=4, logits_chunk=8, gradient_checkpointing=True)
    result = train(_config(steps=3, out=str(tmp_path), resume=True, **changed), small_policy(), _task())
    assert [line["step"] for line in result.metrics] == [3]
