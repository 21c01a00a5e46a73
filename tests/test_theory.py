"""Tables, weights and objectives against exact values made elsewhere, and the closed forms against the tables."""
from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import beta
from scipy.stats import binom

from sage_lite import advantages, closed_forms, theory
from sage_lite.categorical import Categorical
from sage_lite.errors import UserError

ZERO_SUM = ["sage", "grpo", "dr_grpo", "rloo", "maxrl", "focal_grpo"]
ALL = [*ZERO_SUM, "reinforce", "sign"]
every = pytest.mark.parametrize("name", ALL)
EXTREME_TAUS = [1e-6, 1e-3, 0.1, 1.0, 1e3, 1e6]


def close(got, want, tolerance=1e-10):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def exact(name, **parameters):
    """The advantage without GRPO's epsilon, as the formulas on paper have it."""
    return advantages.get(name, **parameters, **({"eps": 0} if name in ("grpo", "focal_grpo") else {}))


# --- values from exact enumeration ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name, parameters, weights", [
    ("grpo", {}, [2.64575, 1.85566, 2.32769, 2.64575]),
    ("grpo", {"ddof": 1}, [2.47487, 1.73581, 2.17735, 2.47487]),
    ("sage", {"tau": 0.1}, [6.99746, 1.98413, 1.11105, 0.99995]),
    ("sage", {"tau": 0.3}, [5.40144, 1.80621, 1.06039, 0.95944]),
    ("sage", {"tau": 1.0}, [1.23766, 0.82584, 0.63621, 0.60056]),
    ("maxrl", {}, [7.0, 1.98438, 1.11111, 1.0]),
    ("focal_grpo", {"gamma": 1.0}, [2.31503, 0.92783, 0.43566, 0.33072]),
    ("rloo", {}, [1.0, 1.0, 1.0, 1.0]),
    ("dr_grpo", {}, [0.875, 0.875, 0.875, 0.875]),
    ("reinforce", {"baseline": 0.3}, [1.0, 1.0, 1.0, 1.0]),
    ("sign", {}, [2.0, 2.0, 2.0, 2.0]),
])
def test_weights_at_eight_rollouts(name, parameters, weights):
    close(theory.prompt_weight(exact(name, **parameters), [0.0, 0.5, 0.9, 1.0], 8), weights, 5e-6)


# Weight and objective at p = .05, .5, .99, from 50-digit arithmetic.
@pytest.mark.parametrize("name, parameters, m, weight, objective", [
    ("sage", {"tau": 0.1}, 4, [2.8519952959950445, 1.749780588874608, 1.0100379211637138],
     [0.14626543787719296, 1.1664825674371613, 1.8230364627018345]),
    ("sage", {"tau": 0.1}, 16, [10.727718605208528, 1.9997285410351595, 1.0100515647259798],
     [0.6353270395678869, 2.6239865474397375, 3.3070316973570186]),
    ("sage", {"tau": 0.3}, 16, [7.283732984342264, 1.8433386532948701, 0.9713572988125972],
     [0.4144937729041319, 2.004795975665669, 2.649739592780052]),
    ("sage", {"tau": 10.0}, 16, [0.09751086410832, 0.09368474343310211, 0.08982440609374764],
     [0.0048866028356271286, 0.04789497884278918, 0.09284236528060344]),
    ("grpo", {}, 4, [1.710005980849834, 1.6160254037844386, 1.7274562015790136],
     [0.08604175092681908, 0.8273502691896257, 1.6374030806837812]),
    ("grpo", {}, 16, [3.267096746114549, 1.9341226048784481, 3.732991846365951],
     [0.17756057727232497, 1.2040744223902398, 2.370127787756182]),
    ("dr_grpo", {}, 16, [0.9375, 0.9375, 0.9375], [0.046875, 0.46875, 0.928125]),
    ("rloo", {}, 16, [1.0, 1.0, 1.0], [0.05, 0.5, 0.99]),
    ("maxrl", {}, 16, [10.734175396804932, 1.99993896484375, 1.0101010101010102],
     [0.6357508623076576, 2.625083618638306, 3.3081786573754917]),
    ("sign", {}, 16, [2.0, 2.0, 2.0], [0.1, 1.0, 1.98]),
    ("focal_grpo", {"gamma": 0.5}, 16, [3.1032373113899894, 1.357052332920487, 0.9730388895704843],
     [0.17038054078980805, 1.0383836905333068, 1.5937922875341144]),
    ("focal_grpo", {"gamma": 2.0}, 4, [0.9151820507185705, 0.4581329386826371, 0.11362136513906679],
     [0.04722958800451138, 0.35117513459481287, 0.4847346009624146]),
])
def test_weights_and_objectives(name, parameters, m, weight, objective):
    f = exact(name, **parameters)
    close(theory.prompt_weight(f, [0.05, 0.5, 0.99], m), weight)
    close(theory.objective(f, [0.05, 0.5, 0.99], m), objective)


def test_table_of_sage_at_eight_rollouts():
    table = theory.binary_table(advantages.get("sage", tau=0.1), 8)
    close(table.success, [0, 6.99745841164883, 2.9994552750342756, 1.6664649044677051, 0.9999092042625951,
                          0.5999564172546201, 0.3333131558921237, 0.1428497306717855, 0.0])
    close(table.failure[[0, 8]], [0.0, 0.0])
    close(table.failure[1:8], -np.arange(1, 8) / np.arange(7, 0, -1) * table.success[1:8])


def test_the_entries_that_no_group_has():
    for name in ALL:
        table = theory.binary_table(name, 4)
        assert table.success[0] == table.failure[4] == 0.0
    close(theory.binary_table("sign", 4).success, [0, 1, 1, 1, 1])
    close(theory.binary_table("sign", 4).failure, [-1, -1, -1, -1, 0])


def test_all_reference_values(repository):
    path = repository.parent / "shared" / "reference" / "weights.json"
    if not path.exists():
        pytest.skip("the reference file is not here; samples of it are in the tests above")
    for row in json.loads(path.read_text())["rows"]:
        parameters = {key: row[key] for key in ("tau", "gamma", "ddof") if key in row}
        f, m = exact(row["advantage"], **parameters), row["group_size"]
        table = theory.binary_table(f, m)
        close(table.success[1:], row["success"])
        close(table.failure[:-1], row["failure"])
        close(theory.prompt_weight(f, row["pass_rate"], m), row["prompt_weight"])
        close(theory.objective(f, row["pass_rate"], m), row["objective"])


# --- the general formulas -------------------------------------------------------------------------------------------

@every
@given(p=st.floats(0.001, 0.999), m=st.integers(1, 12))
def test_weight_is_the_definition(name, p, m):
    table = theory.binary_table(name, m)
    k = np.arange(m + 1)
    pmf = binom.pmf(k, m, p)
    by_definition = pmf @ (k / m * table.success / p - (m - k) / m * table.failure / (1 - p))
    close(theory.prompt_weight(name, p, m), by_definition, 1e-9)


@every
@pytest.mark.parametrize("m", [1, 2, 8, 17])
def test_the_objective_is_the_integral_of_the_weight(name, m):
    for p in (0.0, 0.03, 0.5, 1.0):
        area = quad(lambda x: theory.prompt_weight(name, x, m), 0, p, epsabs=1e-12, epsrel=1e-12)[0]
        close(theory.objective(name, p, m), area)


@pytest.mark.parametrize("name", ZERO_SUM)
def test_the_mean_size_of_a_zero_sum_advantage(name):
    p = np.linspace(0, 1, 11)
    want = 2 * p * (1 - p) * theory.prompt_weight(name, p, 8)
    close(theory.mean_abs_advantage(name, p, 8), want)
    close(theory.gradient_budget_proxy(name, p, 8), want)


def test_the_mean_size_of_other_advantages():
    p = np.linspace(0, 1, 11)
    close(theory.mean_abs_advantage("sign", p, 8), np.ones(11))
    close(theory.mean_abs_advantage("reinforce", p, 8), p)
    close(theory.mean_abs_advantage(advantages.get("reinforce", baseline=2), p, 8), p + 2 * (1 - p))


def test_scalar_in_scalar_out():
    for function in (theory.prompt_weight, theory.objective, theory.mean_abs_advantage, theory.gradient_budget_proxy):
        assert isinstance(function("sage", 0.5, 8), float)
        assert function("sage", torch.full((2, 3), 0.5), 8).shape == (2, 3)
    assert isinstance(theory.degenerate_probability(0.5, 8), float)


def test_a_name_has_the_registrys_defaults():
    close(theory.prompt_weight("grpo", 0.5, 8), theory.prompt_weight(advantages.get("grpo", eps=1e-4), 0.5, 8), 0)
    assert theory.prompt_weight("grpo", 0.0, 8) < math.sqrt(7) - 1e-4


@pytest.mark.parametrize("lambda_", [
    lambda r: r - r.mean(-1, keepdim=True),
    lambda r: (r.float() - r.float().mean(-1, keepdim=True)).requires_grad_(),
    lambda r: r.numpy() - r.numpy().mean(-1, keepdims=True),
    lambda r: r.sub_(r.mean(-1, keepdim=True)),
])
def test_a_readers_own_lambda(lambda_):
    close(theory.prompt_weight(lambda_, [0.1, 0.9], 8), [0.875, 0.875], 1e-6)


@pytest.mark.parametrize("lambda_, complaint", [
    (lambda r: r - r.mean(), "other groups"),
    (lambda r: r - r[..., :1], "order"),
    (lambda r: r - r[..., r.shape[-1] // 2:r.shape[-1] // 2 + 1], "order"),
    (lambda r: r - r[..., :1] / 2 - r[..., -1:] / 2, "order"),
    (lambda r: r - r[..., :1] + r[..., 1:2], "order"),
    (lambda r: r * torch.linspace(1, 2, r.shape[-1]), "equal rollouts"),
    (lambda r: r / r.mean(-1, keepdim=True), r"nan.*\[0, 0, 0"),
    (lambda r: r.sum(-1), "shape"),
    (lambda r: None, "None"),
    (3, "a name or a function.*3"),
])
@pytest.mark.parametrize("m", [5, 6, 7, 8, 9, 16, 64, 1024])
def test_what_is_no_group_advantage(lambda_, complaint, m):
    with pytest.raises(UserError, match=complaint):
        theory.binary_table(lambda_, m)


def test_a_finished_table_may_stand_for_its_advantage():
    table = theory.binary_table("sage", 8)
    close(theory.objective(table, 0.3, 8), theory.objective("sage", 0.3, 8), 0)
    with pytest.raises(UserError, match="group_size 8, got group_size 4"):
        theory.prompt_weight(table, 0.3, 4)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 8, 9, 16, 64, 1024])
def test_what_is_a_group_advantage_passes_at_every_size(m):
    close(theory.prompt_weight(lambda r: r.float() - r.float().mean(-1, keepdim=True), 0.3, m), 1 - 1 / m, 1e-6)


def test_a_pass_rate_as_the_library_makes_it():
    policy = Categorical([0.0, 0.0], [1.0, 0.0])
    want = theory.prompt_weight("sage", 0.5, 8)
    close(theory.prompt_weight("sage", policy.pass_rate(), 8), want)
    close(theory.prompt_weight("sage", [policy.pass_rate(), 0.5], 8), [want, want])
    close(theory.prompt_weight("sage", torch.full((2, 1), 0.5, dtype=torch.bfloat16), 8), [[want], [want]])
    close(closed_forms.maxrl_weight(policy.pass_rate(), 7), 2 - 2**-6)
    rounded_up = torch.tensor(1.0, dtype=torch.float64).nextafter(torch.tensor(2.0, dtype=torch.float64))
    assert theory.degenerate_probability(rounded_up, 8) == 1.0  # a sum of probabilities


@pytest.mark.parametrize("pass_rate, m, complaint", [
    (1.5, 8, "1.5"), (-0.1, 8, "-0.1"), (math.nan, 8, "nan"), ([0.5, 2.0], 8, "2.0"), ("half", 8, "half"),
    ("0.5", 8, "'0.5'"), (["0.5"], 8, "'0.5'"), (0.5 + 0j, 8, "0j"), (torch.tensor(0.5 + 0j), 8, "complex|0.j"),
    (torch.tensor(1.5, requires_grad=True), 8, "1.5"), (1 + 1e-9, 8, "1.000000001"),
    (0.5, 0, "0"), (0.5, 2.5, "2.5"), (0.5, True, "True"), (0.5, -3, "-3"),
])
def test_bad_input_is_named(pass_rate, m, complaint):
    with pytest.raises(ValueError, match=complaint):
        theory.prompt_weight("sage", pass_rate, m)


@pytest.mark.parametrize("m", [1, 2, 64, 4096])
def test_finite_at_the_extremes(m):
    p = np.array([0.0, 1e-300, 1e-9, 0.5, 1 - 1e-16, 1.0])
    for tau in EXTREME_TAUS if m < 4096 else (1e-6, 1e6):
        f = advantages.get("sage", tau=tau)
        table = theory.binary_table(f, m)
        for function in (theory.prompt_weight, theory.objective, theory.mean_abs_advantage):
            value = function(table, p, m)
            assert np.isfinite(value).all() and (value >= 0).all()
        close(theory.prompt_weight(table, [0.0, 1.0], m), [table.gain[0], table.gain[-1]], 1e-15)
        close(theory.objective(table, 1.0, m), table.gain.mean(), 1e-12)


def test_probabilities_of_a_large_group_sum_to_one():
    close(theory.prompt_weight("rloo", np.linspace(0, 1, 101), 1024), np.ones(101), 1e-14)


# --- the formulas on paper ------------------------------------------------------------------------------------------

FORMS = [("sage", {"tau": tau}) for tau in (1e-6, 0.1, 0.3, 1.0, 10.0, 1e6)]
FORMS += [("maxrl", {}), ("rloo", {}), ("dr_grpo", {}), ("grpo", {}), ("grpo", {"ddof": 1})]
FORMS += [("focal_grpo", {"gamma": gamma}) for gamma in (0.5, 1.0, 2.0)]


@pytest.mark.parametrize("name, parameters", FORMS)
@pytest.mark.parametrize("m", [2, 8, 33])
def test_kappa(name, parameters, m):
    f, p = exact(name, **parameters), np.linspace(0, 1, 7)
    table, kappa = theory.binary_table(f, m), closed_forms.kappa(name, m, **parameters)
    np.testing.assert_allclose(kappa, (table.success - table.failure)[1:m] / m, rtol=1e-11)
    weight = (m - 1) * np.array([binom.pmf(np.arange(m - 1), m - 2, x) @ kappa for x in p])
    np.testing.assert_allclose(theory.prompt_weight(f, p, m), weight, rtol=1e-11)
    sums = np.append(0.0, kappa.cumsum())
    objective = np.array([binom.pmf(np.arange(m), m - 1, x) @ sums for x in p])
    np.testing.assert_allclose(theory.objective(f, p, m), objective, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("tau", EXTREME_TAUS)
@pytest.mark.parametrize("m", [1, 2, 8, 512])
def test_the_papers_delta(m, tau):
    f = advantages.get("sage", tau=tau)
    delta = closed_forms.sage_delta(m, tau)
    p = np.array([0.0, 0.05, 0.5, 0.9, 1.0])
    weight = theory.prompt_weight(f, p, m)
    np.testing.assert_allclose([binom.pmf(np.arange(m), m - 1, x) @ delta for x in p], weight, rtol=1e-10)
    np.testing.assert_allclose(closed_forms.sage_weight_ends(m, tau), weight[[0, -1]], rtol=1e-12)


def test_the_papers_delta_as_it_is_printed():
    m, c = 8, math.exp(1 / 0.3)
    s = np.arange(m)
    printed = m * (c - 1) * (m - 1 + s * (c - 1)) / ((m + s * (c - 1)) * (m + (s + 1) * (c - 1)))
    close(closed_forms.sage_delta(m, 0.3), printed, 1e-13)


@pytest.mark.parametrize("call, complaint", [
    (lambda: closed_forms.kappa("grpo", 4, ddof=5), "ddof.*5"),
    (lambda: closed_forms.kappa("grpo", 4, ddof="1"), "ddof.*'1'"),
    (lambda: closed_forms.maxrl_weight(0.5, -1), "terms.*-1"),
    (lambda: closed_forms.maxrl_objective(0.5, 2.5), "terms.*2.5"),
    (lambda: closed_forms.tail_miss([0.5, 0.3], [0.1, 0.2, 0.3], 4), r"\(2,\) and \(3,\)"),
])
def test_bad_values_of_the_formulas_are_named(call, complaint):
    with pytest.raises(UserError, match=complaint):
        call()


def test_kappa_has_no_form_for_reinforce():
    with pytest.raises(UserError, match="'reinforce'.*sage"):
        closed_forms.kappa("reinforce", 8)


def test_sage_tends_to_maxrl():
    p = np.array([0.0, 1e-3, 0.5, 1.0])
    f = advantages.get("sage", tau=1e-3)
    close(closed_forms.maxrl_weight(p, 7), theory.prompt_weight("maxrl", p, 8))
    close(closed_forms.maxrl_objective(p, 7), theory.objective("maxrl", p, 8))
    close(closed_forms.maxrl_weight(p, 7), theory.prompt_weight(f, p, 8))
    close(closed_forms.maxrl_objective(p, 7), theory.objective(f, p, 8))


def test_sage_at_a_large_tau_is_a_small_step():
    weight = theory.prompt_weight(advantages.get("sage", tau=1e5), np.linspace(0, 1, 5), 8)
    np.testing.assert_allclose(weight, closed_forms.sage_flat_weight(8, 1e5), rtol=1e-4)
    np.testing.assert_allclose(weight, theory.prompt_weight("dr_grpo", 0.5, 8) / 1e5, rtol=1e-4)


@pytest.mark.parametrize("tau", [0.3, 1.0, 10.0])
def test_large_groups(tau):
    p, f = np.array([0.05, 0.5, 1.0]), advantages.get("sage", tau=tau)
    weight, objective = closed_forms.sage_large_group_weight(p, tau), closed_forms.sage_large_group_objective(p, tau)
    np.testing.assert_allclose(theory.prompt_weight(f, p, 2048), weight, rtol=2e-2)
    np.testing.assert_allclose(theory.objective(f, p, 2048), objective, rtol=2e-2)
    c = math.exp(1 / tau)
    close(weight, (c - 1) / (1 - p + p * c), 1e-12)
    close(objective, np.log(1 - p + p * c), 1e-12)


@pytest.mark.parametrize("tau", EXTREME_TAUS)
def test_large_group_limits_stay_in_range(tau):
    p = np.array([0.0, 1e-9, 0.5, 1.0])
    objective = closed_forms.sage_large_group_objective(p, tau)
    assert objective[0] == 0 and np.isfinite(objective).all()
    np.testing.assert_allclose(objective[-1], 1 / tau, rtol=1e-12)
    if tau > 100:  # the first two terms in 1 / tau
        np.testing.assert_allclose(objective, p / tau + p * (1 - p) / (2 * tau**2), rtol=1e-12 + 1 / tau**2)
    weight = closed_forms.sage_large_group_weight(p, tau)
    assert np.isfinite(weight[1:]).all() and (weight[0] == np.inf) == (tau < 0.0014)


# --- counting facts -------------------------------------------------------------------------------------------------

@given(m=st.integers(2, 32), data=st.data(), tau=st.floats(0.05, 20))
def test_effective_sample_size_is_that_of_the_softmax_weights(m, data, tau):
    k = data.draw(st.integers(0, m))
    weights = advantages.sage((torch.arange(m) < k).double(), tau) + 1
    size = closed_forms.effective_sample_size(k, m, tau)
    close(size, float(weights.sum() ** 2 / weights.square().sum()), 1e-9)
    assert max(k, 1) - 1e-9 <= size <= m + 1e-9


@given(m=st.integers(2, 32), data=st.data())
def test_adaptive_tau_reaches_its_target(m, data):
    k = data.draw(st.integers(1, m - 1))
    target = k + data.draw(st.floats(0.01, 0.99)) * (m - k)
    close(closed_forms.effective_sample_size(k, m, closed_forms.adaptive_tau(k, m, target)), target, 1e-9)


def test_adaptive_tau_where_there_is_none():
    assert closed_forms.adaptive_tau(2, 8, 8) == math.inf
    for k, target in ((0, 4), (8, 8), (4, 4), (4, 3), (2, 8.5)):
        with pytest.raises(UserError, match="effective sample size"):
            closed_forms.adaptive_tau(k, 8, target)
    with pytest.raises(UserError, match="9"):
        closed_forms.effective_sample_size(9, 8, 0.1)


@pytest.mark.parametrize("p, q, n, peak", [
    (0.5, 0.01, 7, 0.917), (0.5, 0.05, 5, 0.724), (0.3, 0.01, 10, 0.876), (0.1, 0.01, 25, 0.706),
    (0.9, 0.01, 23, 0.725),
])
def test_tail_miss_peaks(p, q, n, peak):
    miss = [closed_forms.tail_miss(p, q, size) for size in range(1, 200)]
    assert int(np.argmax(miss)) + 1 == n
    close(max(miss), peak, 5e-4)


def test_tail_miss_by_counting():
    p, q, n = 0.5, 0.2, 3
    outcomes = np.array(np.meshgrid(*[range(3)] * n)).reshape(n, -1).T  # 0 wrong, 1 common correct, 2 rare correct
    probability = np.array([1 - p, p - q, q])[outcomes].prod(-1)
    mixed_and_missed = (outcomes == 0).any(-1) & (outcomes == 1).any(-1) & ~(outcomes == 2).any(-1)
    close(closed_forms.tail_miss(p, q, n), probability[mixed_and_missed].sum(), 1e-14)
    with pytest.raises(UserError, match="0.6 of 0.5"):
        closed_forms.tail_miss(0.5, 0.6, n)


@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=20), m=st.integers(1, 16))
def test_uneven_prompts_make_more_degenerate_groups(rates, m):
    assert theory.degenerate_probability(rates, m).mean() >= theory.degenerate_probability(np.mean(rates), m) - 1e-12


@pytest.mark.parametrize("a, b, mean, even", [(0.258, 0.258, 0.5, 0.125), (0.581, 0.206, 0.738, 0.301)])
def test_degenerate_groups_of_four(a, b, mean, even):
    share = (beta(a + 4, b) + beta(a, b + 4)) / beta(a, b)  # p^4 + (1 - p)^4 averaged over Beta(a, b)
    close([a / (a + b), share, theory.degenerate_probability(mean, 4)], [mean, 0.69, even], 1e-3)
    close(theory.degenerate_probability([0.089, 0.911], 4), 0.69, 2e-3)


def test_where_the_sign_advantage_gets_its_gradient():
    """Of w = 2, all-fail groups give (1-p)^(G-1), the slope of pass@G over G, and all-correct ones p^(G-1)."""
    p, g = np.array([0.1, 0.5, 0.8]), 8
    table = theory.binary_table("sign", g)
    mixed = table.success.copy(), table.failure.copy()
    mixed[0][g] = mixed[1][0] = 0.0
    rest = theory.prompt_weight(theory.BinaryTable(*mixed), p, g)
    close(2 - rest, (1 - p) ** (g - 1) + p ** (g - 1), 1e-12)


def test_mean_failure_can_rise_while_the_mean_pass_rate_rises():
    before, after = np.array([0.6, 0.1]), np.array([0.7, 0.05])
    assert after.mean() > before.mean()
    close([((1 - before) ** 4).mean(), ((1 - after) ** 4).mean()], [0.341, 0.411], 5e-4)
