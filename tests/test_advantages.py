"""Properties of every advantage, and the kinds of faults that users of other systems reported."""
from __future__ import annotations

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_lite import advantages
from sage_lite.errors import UserError

ZERO_SUM = ["sage", "grpo", "dr_grpo", "rloo", "maxrl", "focal_grpo"]
SHIFT_INVARIANT = ["sage", "grpo", "dr_grpo", "rloo"]
ALL = [*ZERO_SUM, "reinforce", "sign"]
every = pytest.mark.parametrize("name", ALL)

# Multiples of 1/64 in [0, 1]: the domain of every advantage, many ties, and sums that are exact.
reward = st.integers(0, 64).map(lambda n: n / 64)
group = st.lists(reward, min_size=1, max_size=12).map(lambda g: torch.tensor(g, dtype=torch.float64))
tau = st.floats(1e-6, 1e6)


def test_the_registry_holds_what_the_other_parts_ask_for():
    assert set(ALL) <= set(advantages.names())


@every
@given(r=group)
def test_shape_dtype_and_finite(name, r):
    a = advantages.get(name)(r)
    assert a.shape == r.shape and a.dtype is torch.float64 and a.isfinite().all()
    assert advantages.get(name)(r.float()).dtype is torch.float32


@pytest.mark.parametrize("name", ZERO_SUM)
@given(r=group)
def test_sums_to_zero(name, r):
    a = advantages.get(name)(r)
    assert abs(a.sum()) <= 1e-13 * len(r) * max(1.0, a.abs().max())


@given(r=group, tau=tau)
def test_sage_sums_to_zero_at_every_tau(r, tau):
    a = advantages.sage(r, tau)
    assert abs(a.sum()) <= 1e-14 * len(r) * a.abs().max()


@every
@given(r=group, data=st.data())
def test_permutation_equivariant(name, r, data):
    order = torch.tensor(data.draw(st.permutations(range(len(r)))))
    f = advantages.get(name)
    torch.testing.assert_close(f(r[order]), f(r)[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SHIFT_INVARIANT)
@given(r=group, shift=st.integers(-(2**20), 2**20))
def test_shift_invariant(name, r, shift):
    f = advantages.get(name)
    torch.testing.assert_close(f(r + shift / 64), f(r), rtol=1e-12, atol=1e-12)


@given(r=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16), tau=tau,
       dtype=st.sampled_from([torch.float32, torch.float64]))
def test_sage_is_bounded(r, tau, dtype):
    a = advantages.sage(torch.tensor(r, dtype=dtype), tau=tau)
    assert a.min() >= -1 and a.max() <= len(r) - 1


def test_sage_is_bounded_to_the_last_bit():
    for m in range(1, 130):  # one success: rounding alone would pass M - 1 at M = 31, 41, 50, ...
        assert advantages.sage(torch.arange(m) < 1, tau=1e-6).max() <= m - 1


@pytest.mark.parametrize("name", ZERO_SUM)
@given(value=st.floats(0, 1), m=st.integers(1, 40),
       dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_constant_groups_give_exact_zeros(name, value, m, dtype):
    r = torch.full((3, m), value).to(dtype)
    for parameters in ({"eps": 0}, {"eps": 0, "ddof": 1}) if name in ("grpo", "focal_grpo") else ({},):
        assert (advantages.get(name, **parameters)(r) == 0).all()


@every
def test_a_group_of_one(name):
    a = advantages.get(name)(torch.tensor([[1.0], [0.0], [0.2]]))
    expected = {"reinforce": [[1.0], [0.0], [0.2]], "sign": [[1.0], [-1.0], [-0.6]]}.get(name, [[0.0]] * 3)
    torch.testing.assert_close(a, torch.tensor(expected))


@every
def test_groups_do_not_see_each_other(name):
    r = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
    a = advantages.get(name)(r)
    alone = torch.stack([torch.stack([advantages.get(name)(g) for g in row]) for row in r])
    torch.testing.assert_close(a, alone)


@every
def test_what_comes_in(name):
    bits = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 1]])
    want = advantages.get(name)(bits.float())
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool):
        got = advantages.get(name)(bits.to(dtype))
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(advantages.get(name)(bits.tolist()), want)
    as_float64 = advantages.get(name)(bits.numpy().astype(np.float64))
    torch.testing.assert_close(as_float64, want.double(), rtol=1e-6, atol=1e-6)


@every
def test_detached(name):
    r = torch.tensor([1.0, 0.0, 0.5], requires_grad=True)
    assert not advantages.get(name)(r).requires_grad


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(name, bad):
    with pytest.raises(UserError, match=rf"{bad}.*index \(1, 2\)"):
        advantages.get(name)(torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, bad]]))


@every
@pytest.mark.parametrize("shape", [(), (0,), (4, 0)])
def test_no_group(name, shape):
    with pytest.raises(UserError, match="last axis"):
        advantages.get(name)(torch.zeros(shape))


def test_none_among_rewards_points_to_grouped():
    with pytest.raises(UserError, match="grouped"):
        advantages.sage([1.0, None])


@pytest.mark.parametrize("name, parameters, named", [
    ("sage", {"tau": 0}, "tau.*0"), ("sage", {"tau": -0.5}, "tau.*-0.5"), ("sage", {"tau": math.nan}, "tau.*nan"),
    ("sage", {"tau": math.inf}, "tau.*inf"), ("sage", {"tau": "0.1"}, "tau.*'0.1'"),
    ("sage", {"tau": None}, "tau.*None"), ("sage", {"tau": True}, "tau.*True"),
    ("grpo", {"ddof": np.array([0, 1])}, "ddof.*array"), ("focal_grpo", {"ddof": "1"}, "ddof.*'1'"),
    ("grpo", {"eps": torch.tensor([1.0, 2.0])}, "eps.*tensor"),
    ("grpo", {"eps": -1e-4}, "eps.*-0.0001"), ("grpo", {"eps": math.nan}, "eps.*nan"), ("grpo", {"ddof": 2}, "ddof.*2"),
    ("focal_grpo", {"gamma": -1}, "gamma.*-1"), ("focal_grpo", {"ddof": 0.5}, "ddof.*0.5"),
    ("reinforce", {"baseline": math.inf}, "baseline.*inf"), ("sage", {"tua": 1}, "'tua'.*tau"),
    ("maxrl", {"tau": 1}, "'tau'.*none"), ("softmax_grpo", {}, "'softmax_grpo'.*sage"),
])
def test_get_refuses_at_once(name, parameters, named):
    with pytest.raises(ValueError, match=named):
        advantages.get(name, **parameters)


def test_rewards_outside_an_advantages_domain():
    with pytest.raises(UserError, match="-1.0 at index 1"):
        advantages.maxrl(torch.tensor([1.0, -1.0]))
    with pytest.raises(UserError, match="2.0 at index 0"):
        advantages.focal_grpo(torch.tensor([2.0, 1.0]))


def test_values_by_hand():
    r = torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64)

    def check(a, expected):
        torch.testing.assert_close(a, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)

    check(advantages.dr_grpo(r), [2.0, 0.0, -1.0, -1.0])
    check(advantages.rloo(r), [8 / 3, 0.0, -4 / 3, -4 / 3])
    check(advantages.maxrl(r), [2.0, 0.0, -1.0, -1.0])
    check(advantages.reinforce(r, baseline=0.5), [2.5, 0.5, -0.5, -0.5])
    check(advantages.sign(r), [5.0, 1.0, -1.0, -1.0])
    check(advantages.grpo(r, eps=0), [x / math.sqrt(6 / 4) for x in (2.0, 0.0, -1.0, -1.0)])
    check(advantages.grpo(r, eps=0.5, ddof=1), [x / (math.sqrt(2) + 0.5) for x in (2.0, 0.0, -1.0, -1.0)])
    check(advantages.sage(r * math.log(2), tau=1.0), [4 * x / 12 - 1 for x in (8.0, 2.0, 1.0, 1.0)])
    half = torch.tensor([1.0, 0.5, 0.5, 0.0], dtype=torch.float64)  # success share 1/2, std sqrt(1/8)
    check(advantages.focal_grpo(half, gamma=2, eps=0), [x / math.sqrt(1 / 8) / 4 for x in (0.5, 0.0, 0.0, -0.5)])
    check(advantages.maxrl(torch.zeros(3, dtype=torch.float64)), [0.0, 0.0, 0.0])


@given(r=group, tau=st.floats(0.05, 50))
def test_sage_is_its_one_line(r, tau):
    one_line = len(r) * (r / tau).softmax(-1) - 1
    torch.testing.assert_close(advantages.sage(r, tau), one_line, rtol=1e-9, atol=1e-13 * len(r))


@pytest.mark.parametrize("tau", [1e-6, 0.01, 0.3, 2.0, 1e3, 1e6])
def test_sage_keeps_its_digits_at_every_tau(tau):
    getcontext().prec = 60
    r = torch.tensor([0.0, 0.25, 0.5, 1.0, 0.25, 0.0, 0.75], dtype=torch.float64)
    e = [(Decimal(x) / Decimal(tau)).exp() for x in r.tolist()]
    exact = torch.tensor([float(7 * x / sum(e) - 1) for x in e], dtype=torch.float64)
    torch.testing.assert_close(advantages.sage(r, tau), exact, rtol=1e-13, atol=0)
    torch.testing.assert_close(advantages.sage(r.float(), tau), exact.float(), rtol=2e-5, atol=0)


@given(r=group, beta=st.floats(0.05, 5))
def test_sage_is_the_risk_sensitive_advantage_over_tau(r, beta):
    """RS-GRPO (arXiv 2509.24261): A_i = (e^(beta r_i) / mean_j e^(beta r_j) - 1) / beta, at beta = 1 / tau."""
    e = [math.exp(beta * x) for x in r.tolist()]
    risk_sensitive = [(x / (sum(e) / len(e)) - 1) / beta for x in e]
    tau = 1 / beta
    torch.testing.assert_close((tau * advantages.sage(r, tau)).tolist(), risk_sensitive, rtol=1e-9, atol=1e-12)


@every
def test_whole_numbers_that_float32_cannot_tell_apart(name):
    if name in ("sage", "grpo", "dr_grpo", "rloo"):  # shift-invariant: as for 1 and 0
        a = advantages.get(name)(torch.tensor([[2**40 + 1, 2**40], [2**40, -(2**40)]]))
        torch.testing.assert_close(a[0], advantages.get(name)(torch.tensor([1.0, 0.0], dtype=torch.float64)))
    assert advantages.get(name)(torch.tensor([1, 0])).dtype is torch.float32


def test_sage_keeps_its_digits_in_a_large_float32_group():
    one_success = torch.arange(4096) < 1
    failure = advantages.sage(one_success, tau=0.1)[1]
    assert float(failure) == pytest.approx(float(advantages.sage(one_success.double(), tau=0.1)[1]), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [1e-20, 1e-300])
def test_sage_at_a_tiny_tau(dtype, tau):
    a = advantages.sage(torch.tensor([[1, 0, 0, 1], [2, 1, 0, 0]], dtype=dtype), tau=tau)
    torch.testing.assert_close(a, torch.tensor([[1, -1, -1, 1], [3, -1, -1, -1]], dtype=dtype))


@given(r=group, tau=st.floats(0.1, 10), data=st.data())
def test_reward_noise_changes_a_weight_by_a_bounded_factor(r, tau, data):
    delta = data.draw(st.floats(0, 1))
    noise = torch.tensor(data.draw(st.lists(st.floats(-delta, delta), min_size=len(r), max_size=len(r))))
    ratio = (advantages.sage(r + noise.double(), tau) + 1) / (advantages.sage(r, tau) + 1)
    assert (ratio.log().abs() <= 2 * delta / tau + 1e-6).all()


@pytest.mark.parametrize("gap", [1e-12, 1e-30, 1e25])
def test_grpo_without_epsilon_at_any_scale(gap):
    a = advantages.grpo(torch.tensor([gap, 0.0, 0.0, 0.0]), eps=0)
    torch.testing.assert_close(a, torch.tensor([3.0, -1.0, -1.0, -1.0]) / math.sqrt(3))


def test_register_for_a_readers_own():
    @advantages.register("mine")
    def mine(rewards, power=1.0):
        return rewards.float() ** power

    try:
        assert advantages.get("mine", power=2)(torch.tensor([2.0, 3.0])).tolist() == [4.0, 9.0]
        advantages.register("mine", mine)  # a cell run twice
        with pytest.raises(UserError, match="'pow'.*power"):
            advantages.get("mine", pow=2)
    finally:
        advantages._REGISTRY.pop("mine")
    with pytest.raises(UserError, match="built-in"):
        advantages.register("sage", mine)
    with pytest.raises(UserError, match="function"):
        advantages.register("mine", 3)


def test_a_function_that_does_not_tell_its_parameters():
    advantages.register("mine", torch.relu)
    try:
        assert advantages.get("mine")(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
        with pytest.raises(UserError, match="'mine'.*parameters.*'k': 1"):
            advantages.get("mine", k=1)
    finally:
        advantages._REGISTRY.pop("mine")


# --- a reader's own function ----------------------------------------------------------------------------------------

GROUPS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("own", [
    lambda r: r.numpy() - 0.5,
    lambda r: (r.double() - 0.5).requires_grad_(),
    lambda r: r.sub_(0.5),
    lambda r: (r - 0.5).tolist(),
])
def test_apply_takes_any_function_and_leaves_the_rewards_alone(own):
    rewards = GROUPS.clone()
    a = advantages.apply(own, rewards)
    assert torch.equal(rewards, GROUPS) and torch.equal(a, GROUPS - 0.5)
    assert a.dtype is torch.float32 and not a.requires_grad
    assert torch.equal(advantages.grouped(own, rewards.flatten(), [0] * 4 + [1] * 4), (GROUPS - 0.5).flatten())
    assert torch.equal(rewards, GROUPS)


def test_apply_takes_a_name():
    assert torch.equal(advantages.apply("grpo", GROUPS), advantages.grpo(GROUPS))


BAD_FUNCTIONS = [
    (lambda r: r / r.mean(-1, keepdim=True) - 1, r"nan for the group of rewards \[0, 0"),
    (lambda r: (r - 0.5) * math.inf, r"inf for the group of rewards"),
    (lambda r: r.mean(-1, keepdim=True), r"shape \(2, 1\).*keepdim"), (lambda r: r.sum(-1), r"shape \(2,\)"),
    (lambda r: r.mean(), r"shape \(\)"), (lambda r: None, "None"), (lambda r: r * 1j, "complex"), (3, "function.*3"),
]


@pytest.mark.parametrize("own, complaint", BAD_FUNCTIONS)
def test_what_a_function_returns_is_looked_at(own, complaint):
    with pytest.raises(UserError, match=complaint):
        advantages.apply(own, GROUPS)
    with pytest.raises(UserError, match=complaint):
        advantages.grouped(own, GROUPS.flatten(), [0] * 4 + [1] * 4)


def test_a_finite_advantage_may_have_a_sum_that_is_not():
    assert advantages.apply(lambda r: r + 3e38, GROUPS).isfinite().all()


def test_a_missing_reward_does_not_reach_a_readers_function():
    got = advantages.grouped(lambda r: r / r.mean(-1, keepdim=True) - 1, [1.0, None, 3.0, 2.0, 2.0], [0, 0, 0, 1, 1])
    assert got.tolist() == [-0.5, 0.0, 0.5, 0.0, 0.0]


# --- groups by id ---------------------------------------------------------------------------------------------------

def test_ragged_interleaved_groups():
    rewards = torch.tensor([1.0, 0.0, 5.0, 0.0, 3.0, 0.0, 1.0, 7.0])
    ids = ["a", "b", "c", "a", "c", "b", "b", "solo"]
    got = advantages.grouped("dr_grpo", rewards, ids)
    torch.testing.assert_close(got, torch.tensor([0.5, -1 / 3, 1.0, -0.5, -1.0, -1 / 3, 2 / 3, 0.0]))
    as_numbers = torch.tensor([0, 1, 2, 0, 2, 1, 1, 3])
    torch.testing.assert_close(advantages.grouped("dr_grpo", rewards, as_numbers), got)
    torch.testing.assert_close(advantages.grouped("dr_grpo", rewards, np.array(ids, dtype=object)), got)


@every
@given(sizes=st.lists(st.integers(2, 5), min_size=1, max_size=6), data=st.data())
def test_grouped_is_the_function_on_each_group(name, sizes, data):
    ids = data.draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    rewards = torch.tensor(data.draw(st.lists(reward, min_size=len(ids), max_size=len(ids))), dtype=torch.float64)
    got = advantages.grouped(name, rewards, ids)
    for g in set(ids):
        members = torch.tensor([i for i, each in enumerate(ids) if each == g])
        torch.testing.assert_close(got[members], advantages.get(name)(rewards[members]), rtol=1e-12, atol=1e-12)


@every
def test_a_missing_reward_leaves_its_group(name):
    got = advantages.grouped(name, [1.0, None, 0.0, 1.0, None, None, 0.5, None], [7, 7, 7, 7, 8, 8, 9, 9])
    alone = advantages.get(name)(torch.tensor([1.0, 0.0, 1.0]))
    expected = [alone[0], 0.0, alone[1], alone[2], 0.0, 0.0, advantages.get(name)(torch.tensor([0.5]))[0], 0.0]
    torch.testing.assert_close(got, torch.tensor([float(x) for x in expected]))


def test_nan_is_a_missing_reward_only_where_one_says_so():
    rewards = torch.tensor([1.0, math.nan, 0.0], dtype=torch.float64)
    got = advantages.grouped("rloo", rewards, [0, 0, 0], nan_is_missing=True)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64))
    for same in (rewards.numpy(), rewards.tolist(), list(rewards), rewards.numpy().astype(object)):
        torch.testing.assert_close(advantages.grouped("rloo", same, [0, 0, 0], nan_is_missing=True).double(), got)
    mixed = advantages.grouped("rloo", [1.0, math.nan, None, 0.0], [0, 0, 0, 0], nan_is_missing=True)
    assert mixed.tolist() == [1.0, 0.0, 0.0, -1.0]
    for same in (rewards, rewards.numpy(), rewards.tolist()):
        with pytest.raises(UserError, match="nan at index 1"):
            advantages.grouped("rloo", same, [0, 0, 0])
    with pytest.raises(UserError, match="inf at index 0"):
        advantages.grouped("rloo", torch.tensor([math.inf, 1.0]), [0, 0], nan_is_missing=True)


def test_ids_per_rollout_are_noticed():
    with pytest.raises(UserError, match="ids per rollout"):
        advantages.grouped("sage", [1.0, 0.0, 1.0], ["u1", "u2", "u3"])
    assert advantages.grouped("sage", [1.0], ["u1"]).tolist() == [0.0]
    assert advantages.grouped("sign", [1.0, 0.0], ["u1", "u2"], group_size=1).tolist() == [1.0, -1.0]


def test_equal_prompts_merged_into_one_group_are_noticed():
    ids = ["2+2=?", "2+2=?", "1+1=?", "1+1=?", "2+2=?", "2+2=?"]  # the text as id, one prompt drawn twice
    with pytest.raises(UserError, match=r"'2\+2=\?' has 4 rollouts instead of 2"):
        advantages.grouped("sage", [1.0, 0.0] * 3, ids, group_size=2)


def test_grouped_lengths():
    with pytest.raises(UserError, match=r"\(3,\) and 2 ids"):
        advantages.grouped("sage", [1.0, 0.0, 1.0], [0, 0])
    with pytest.raises(UserError, match=r"\(2, 2\)"):
        advantages.grouped("sage", torch.zeros(2, 2), [0, 0])


@pytest.mark.parametrize("ids", [[[0], [0]], None, 7, torch.zeros(2, 1)])
def test_ids_must_be_one_a_rollout(ids):
    with pytest.raises(UserError, match="group_ids"):
        advantages.grouped("sage", [1.0, 0.0], ids)


@pytest.mark.parametrize("rewards", [None, "ab", np.array(["a", "b"]), ["a", None]])
def test_grouped_needs_numbers(rewards):
    with pytest.raises(UserError, match="rewards"):
        advantages.grouped("sage", rewards, [0, 0])


def test_grouped_keeps_float64():
    rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert advantages.grouped("grpo", rewards, [0, 0, 0]).dtype is torch.float64
