from __future__ import annotations

import dataclasses

import pytest
from test_memory import qwen_1_5b

from sage_lite import advantages, memory, presets
from sage_lite.config import TrainConfig, check
from sage_lite.errors import UserError
from sage_lite.presets import PRESETS, configure
from sage_lite.recipes import RECIPES, recipe
from sage_lite.tasks import task_names


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_run_that_passes_the_checks(name):
    config = configure(name)
    check(config)
    assert config.task in task_names() and config.data == "hub" and recipe(config.method)
    assert PRESETS[name].source and set(PRESETS[name].changes) <= {f.name for f in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(
    "name, tau, group_size, tokens",
    [
        ("paper-gsm8k", 0.1, 8, 256),
        ("paper-countdown", 0.1, 8, 256),
        ("paper-gsm8k-similarity", 0.3, 8, 256),
        ("paper-deepmath", 0.3, 16, 1024),
    ],
)
def test_the_papers_settings(name, tau, group_size, tokens):
    config, method = configure(name), recipe(configure(name).method)
    assert config.model == "Qwen/Qwen2.5-1.5B" and config.method == "sage"
    assert config.advantage_params == {"tau": tau}
    assert (config.group_size, config.batch_size, config.max_new_tokens) == (group_size, 64, tokens)
    assert (config.lr, config.beta, config.temperature, config.top_p) == (1e-6, 1e-3, 1.0, 0.999)
    assert (method.clip_low, method.clip_high, method.normalization) == (0.20, 0.28, "token")
    assert not config.lora and not config.four_bit


def test_an_adapter_takes_its_own_rate_and_what_is_given_wins():
    assert configure("paper-gsm8k", {"lora": 16}).lr is None
    assert configure("paper-gsm8k", {"lora": 16, "lr": 3e-5}).lr == 3e-5
    changed = configure("paper-gsm8k", {"group_size": 4, "data": "rows.jsonl"})
    assert (changed.group_size, changed.data, changed.batch_size) == (4, "rows.jsonl", 64)
    assert configure(None, {"steps": 3}) == TrainConfig(steps=3)
    with pytest.raises(UserError, match="unknown preset 'colab'.*paper-gsm8k"):
        configure("colab")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_another_method_or_task_leaves_behind_what_is_only_the_presets_own(name):
    for method in RECIPES:
        config = configure(name, {"method": method})
        chosen = recipe(method)
        assert callable(advantages.get(chosen.advantage, **{**chosen.advantage_params, **config.advantage_params}))
        assert config.advantage_params == ({} if method != "sage" else PRESETS[name].changes["advantage_params"])
    assert configure(name, {"method": "f_grpo", "advantage_params": {"gamma": 2.0}}).advantage_params == {"gamma": 2.0}
    other = configure(name, {"task": "reasoning_gym:gcd"})
    assert other.task_options == {} and other.data is None and other.advantage_params
    assert configure(name, {"task": "math500"}).data == "hub"


def test_presets_do_not_share_what_can_be_changed():
    configure("paper-gsm8k").advantage_params["tau"] = 9.0
    assert configure("paper-gsm8k").advantage_params == {"tau": 0.1}


def test_the_t4_preset_fits_its_card_and_needs_no_bfloat16():
    config = configure("colab-t4")
    assert config.dtype == "float16" and config.four_bit and config.lora
    needs = memory.predict(config, qwen_1_5b(), prompt_tokens=config.max_prompt_tokens, max_new_tokens=256)
    assert needs.peak < 10 * 2**30  # of 15, with a third for the context, kernels and gaps
    assert needs.gradients == needs.adapter == needs.optimizer / 2  # the adapter is float32


@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("paper-")])
def test_the_papers_presets_fit_80_gb(name):
    config = configure(name)
    prompt = config.max_prompt_tokens or 300
    needs = memory.predict(config, qwen_1_5b(), prompt_tokens=prompt, max_new_tokens=config.max_new_tokens)
    assert needs.peak < 75 * 2**30


def test_the_table_names_every_preset_and_its_source():
    text = presets.table()
    assert all(name in text for name in PRESETS) and "arXiv 2608.09271" in text
