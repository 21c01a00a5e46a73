"""The table of methods: pinned, complete, and every row trains."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_lite import advantages
from sage_lite.categorical import Categorical, train
from sage_lite.errors import UserError
from sage_lite.losses import KINDS, NORMALIZATIONS
from sage_lite.recipes import RECIPES, Recipe, recipe, table

each = pytest.mark.parametrize("name", RECIPES)


def test_the_base_is_dapos_clipped_token_mean():
    base = Recipe("sage")
    assert (base.normalization, base.kind, base.clip_low, base.clip_high, base.drop_dead_groups) == (
        "token", "clip", 0.2, 0.28, False)


PINNED = {
    "reinforce": {"advantage": "reinforce"},
    "rloo": {"advantage": "rloo"},
    "grpo": {"advantage": "grpo"},
    "dr_grpo": {"advantage": "dr_grpo", "normalization": "constant", "clip_high": 0.2},
    "dapo": {"advantage": "grpo", "drop_dead_groups": True},
    "cispo": {"advantage": "grpo", "kind": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sage": {"advantage": "sage", "advantage_params": {"tau": 0.1}},
    "maxrl": {"advantage": "maxrl"},
    "sign": {"advantage": "sign"},
    "f_grpo": {"advantage": "focal_grpo", "advantage_params": {"gamma": 1.0}},
}


@pytest.mark.parametrize("name", PINNED)
def test_a_changed_row_is_another_method_under_the_same_name(name):
    row = recipe(name).differences()
    row.pop("source")
    assert row == PINNED[name]


@each
def test_a_row_names_what_exists(name):
    row = recipe(name)
    assert row is RECIPES[name] and row.source
    assert row.kind in KINDS and row.normalization in NORMALIZATIONS and row.clip_low >= 0 and row.clip_high >= 0
    a = advantages.get(row.advantage, **row.advantage_params)(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert a[0] > 0 and (a[1:] <= 0).all() and a.isfinite().all()


def test_no_two_names_are_one_method():
    rows = [dataclasses.replace(row, source="") for row in RECIPES.values()]
    assert all(a != b for i, a in enumerate(rows) for b in rows[:i])


@each
def test_a_row_trains_a_bandit(name):
    """Every row's advantage and loss raise the pass rate, and on policy the loss's form changes no gradient."""
    row = recipe(name)
    advantage = advantages.get(row.advantage, **row.advantage_params)
    policy = Categorical([0.0, 0.0, 1.0], [1.0, 0.0, 0.0])
    options = dict(kind=row.kind, normalization=row.normalization, clip_low=row.clip_low, clip_high=row.clip_high)
    torch.testing.assert_close(policy.expected_gradient(advantage, 4, max_length=1, **options),
                               policy.expected_gradient(advantage, 4))
    rates = train(policy, advantage, 4, steps=30, lr=0.5)["pass_rate"]
    assert (rates.diff() > 0).all() and rates[-1] > 2 * rates[0]


@pytest.mark.parametrize("name", ["SAGE", "sgae", "", None, "ppo"])
def test_an_unknown_name_never_falls_back(name):
    with pytest.raises(UserError, match=f"unknown method {name!r}; choose one of reinforce, rloo, grpo, .*sage"):
        recipe(name)


def test_a_row_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["sage"].clip_high = 0.5


def test_the_table_shows_names_and_only_the_differences():
    lines = table().splitlines()
    assert lines[0].split() == [
        "method", "advantage", "normalization", "kind", "clip_low", "clip_high", "drop_dead_groups"]
    assert lines[1].split() == ["(base)", "token", "clip", "0.2", "0.28", "False"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert list(cells) == list(RECIPES)
    assert cells["sage"] == ["sage(tau=0.1)", "·", "·", "·", "·", "·"]
    assert cells["dr_grpo"] == ["dr_grpo()", "constant", "·", "·", "0.2", "·"]
    assert cells["cispo"] == ["grpo()", "·", "cispo", "1.0", "4.0", "·"]
    assert cells["dapo"] == ["grpo()", "·", "·", "·", "·", "True"]
