"""The loss against a slow reading of its formula, token by token; and what must stay finite, exact or zero."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_lite.errors import UserError
from sage_lite.losses import KINDS, NORMALIZATIONS, chunked_logprobs, kl_k3, loss_denominator, policy_loss
from sage_lite.recipes import RECIPES
from sage_lite.rollout import completion_mask

NAN, INF = float("nan"), float("inf")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_normalization = pytest.mark.parametrize("normalization", NORMALIZATIONS)


def close(got, want, tolerance=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), rtol=tolerance, atol=tolerance)


def batch(seed=0, rollouts=5, width=6, dtype=torch.float64):
    """Rollouts of different lengths, ratios on both sides of both clips, advantages of both signs and a zero."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rollouts, width, generator=g, dtype=dtype) * 3
    logprobs = old + 0.5 * torch.randn(rollouts, width, generator=g, dtype=dtype)
    ref = old + 0.5 * torch.randn(rollouts, width, generator=g, dtype=dtype)
    advantages = torch.randn(rollouts, generator=g, dtype=dtype)
    advantages[-1] = 0.0
    lengths = torch.randint(1, width + 1, (rollouts,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    return logprobs.requires_grad_(), old, advantages, mask, ref


def slow(logprobs, old, advantages, mask, ref, *, clip_low=0.2, clip_high=0.28, normalization="token", kind="clip",
         beta=0.0, max_length=None):
    """The formulas in plain Python, one token at a time: loss, and its gradient in each log-probability."""
    rows = [[t for t, alive in enumerate(row) if alive] for row in mask.tolist()]
    rollouts, tokens = sum(1 for row in rows if row), sum(len(row) for row in rows)
    loss, gradient = 0.0, torch.zeros_like(logprobs)
    for i, row in enumerate(rows):
        a = advantages[i].item()
        for t in row:
            weight = {"token": 1 / tokens, "sequence": 1 / (len(row) * rollouts),
                      "constant": 1 / (rollouts * (max_length or 1))}[normalization]
            logp = logprobs[i, t].item()
            rho = math.exp(logp - old[i, t].item())
            bounded = min(max(rho, 1 - clip_low), 1 + clip_high)
            if kind == "clip":
                value = min(rho * a, bounded * a)
                slope = rho * a if rho * a <= bounded * a else 0.0
            else:
                value, slope = bounded * a * logp, bounded * a
            d = ref[i, t].item() - logp
            value -= beta * (math.exp(d) - d - 1)
            slope -= beta * (1 - math.exp(d))
            loss -= weight * value
            gradient[i, t] = -weight * slope
    return loss, gradient


# -- the formula -------------------------------------------------------------------------------------------------


@every_kind
@every_normalization
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clips", [(0.2, 0.28), (0.0, 0.0), (1.0, 4.0), (0.1, 0.5)])
def test_loss_and_gradient_are_the_formula_token_by_token(kind, normalization, beta, clips):
    for seed in range(5):
        logprobs, old, advantages, mask, ref = batch(seed)
        options = dict(kind=kind, normalization=normalization, beta=beta, clip_low=clips[0], clip_high=clips[1],
                       max_length=9)
        loss, _ = policy_loss(logprobs, old, advantages, mask, ref_logprobs=ref, **options)
        want, slope = slow(logprobs, old, advantages, mask, ref, **options)
        close(loss, want)
        close(torch.autograd.grad(loss, logprobs)[0], slope)


@pytest.mark.parametrize(("rho", "advantage", "value", "slope"), [
    (1.0, 2.0, 2.0, 2.0),      # on policy: the plain policy gradient
    (1.5, 1.0, 1.28, 0.0),     # already far up and good: no more
    (0.5, 1.0, 0.5, 0.5),      # good but fallen: still pulled up
    (0.5, -1.0, -0.8, 0.0),    # already far down and bad: no more
    (1.5, -1.0, -1.5, -1.5),   # bad but risen: still pushed down
    (1.27, 1.0, 1.27, 1.27),   # between the two ceilings 1.2 and 1.28: clip_high is on the upper side
    (0.81, -1.0, -0.81, -0.81),
])
def test_each_side_of_the_clip(rho, advantage, value, slope):
    logprobs = torch.tensor([[math.log(rho)]], dtype=torch.float64, requires_grad=True)
    loss, stats = policy_loss(logprobs, torch.zeros_like(logprobs), torch.tensor([advantage]), torch.ones(1, 1))
    close(loss, -value, 1e-7)
    close(torch.autograd.grad(loss, logprobs)[0], [[-slope]], 1e-7)
    assert stats["clip_share"] == (slope == 0.0) and stats["ratio_max"] == pytest.approx(rho)


@pytest.mark.parametrize(("rho", "weight"), [(0.01, 0.01), (1.0, 1.0), (3.0, 3.0), (10.0, 5.0)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_keeps_every_tokens_gradient_and_its_ceiling_is_one_plus_clip_high(rho, weight, advantage):
    row = RECIPES["cispo"]
    logprobs = torch.tensor([[math.log(rho)]], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), torch.tensor([advantage]), torch.ones(1, 1),
                          kind=row.kind, clip_low=row.clip_low, clip_high=row.clip_high)
    close(torch.autograd.grad(loss, logprobs)[0], [[-weight * advantage]])


@every_normalization
def test_on_policy_clip_and_cispo_give_the_plain_policy_gradient(normalization):
    logprobs, _, advantages, mask, _ = batch()
    old = logprobs.detach()
    plain = {"token": -(advantages[:, None] * logprobs)[mask].mean(),
             "sequence": -(advantages[:, None] * logprobs * mask).sum(-1).div(mask.sum(-1)).mean(),
             "constant": -(advantages[:, None] * logprobs * mask).sum() / (5 * 7)}[normalization]
    want = torch.autograd.grad(plain, logprobs)[0]
    for kind in KINDS:
        loss, stats = policy_loss(logprobs, old, advantages, mask, kind=kind, normalization=normalization, max_length=7)
        close(torch.autograd.grad(loss, logprobs)[0], want)
        assert stats == {"clip_share": 0.0, "ratio_max": 1.0}


def test_on_policy_the_value_is_minus_the_mean_advantage_and_says_nothing():
    """Zero-sum advantages and equal lengths: loss 0, gradient not ("why is my loss 0?")."""
    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    loss, _ = policy_loss(logprobs, logprobs.detach(), torch.tensor([3.0, -1.0, -1.0, -1.0]), torch.ones(4, 3))
    assert loss.item() == 0.0
    close(torch.autograd.grad(loss, logprobs)[0], torch.tensor([[-3.0], [1.0], [1.0], [1.0]]).expand(4, 3) / 12, 1e-6)


@pytest.mark.parametrize(("normalization", "want"), [
    # a long and a short rollout, advantage 1 and -1 (logprobs are the same): the weight of a token, and of the rollout
    ("token", ([0.1] * 2, [0.1] * 8)), ("sequence", ([0.25] * 2, [0.0625] * 8)), ("constant", ([0.05] * 2, [0.05] * 8)),
])
def test_what_each_normalization_weighs(normalization, want):
    mask = torch.arange(10) < torch.tensor([[2], [8]])
    logprobs = torch.zeros(2, 10, dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(logprobs, logprobs.detach(), torch.ones(2), mask, normalization=normalization, max_length=10)
    gradient = -torch.autograd.grad(loss, logprobs)[0]
    close(gradient[0, :2], want[0])
    close(gradient[1, :8], want[1])


# -- k3 ----------------------------------------------------------------------------------------------------------


def test_naive_k3_overflows_and_clamping_after_exp_leaves_nan_where_ours_is_finite():
    gap = 100.0  # e^100 is above float32's 3.4e38
    values = {}
    for name, k3 in {
        "naive": lambda logp: torch.exp(gap - logp) - (gap - logp) - 1,
        "clamped after": lambda logp: torch.exp(gap - logp).clamp(max=1e8) - (gap - logp) - 1,
        "ours": lambda logp: kl_k3(logp, torch.tensor(gap)),
    }.items():
        logp = torch.tensor(0.0, requires_grad=True)
        value = k3(logp)
        values[name] = (value.item(), torch.autograd.grad(value, logp)[0].item())
    assert values["naive"] == (INF, -INF)
    assert math.isfinite(values["clamped after"][0]) and math.isnan(values["clamped after"][1])
    assert all(map(math.isfinite, values["ours"]))


@given(logp=st.floats(-1e4, 0), ref=st.floats(-1e4, 0))
def test_k3_is_finite_and_never_negative_with_a_finite_gradient(logp, ref):
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(logp, dtype=dtype, requires_grad=True)
        value = kl_k3(x, torch.tensor(ref, dtype=dtype))
        slope = torch.autograd.grad(value, x)[0]
        assert value.isfinite() and value >= 0.0 and slope.isfinite()
        d = (torch.tensor(ref, dtype=dtype) - x).item()
        if abs(d) < 19.9:
            close(value, math.expm1(d) - d, 1e-5 if dtype is torch.float32 else 1e-12)
            close(slope, 1 - math.exp(d), 1e-5 if dtype is torch.float32 else 1e-12)


def test_k3_of_a_small_step_keeps_its_digits():
    """d^2/2 for d = 1e-4; exp(d) - d - 1 in float32 would lose everything."""
    d = torch.tensor(1e-4)
    assert kl_k3(-d, torch.tensor(0.0)).item() == pytest.approx(5e-9, rel=0.05)
    assert (torch.exp(d) - d - 1).item() != pytest.approx(5e-9, rel=0.5)


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_k3_averages_to_the_kl_divergence_and_its_gradient_to_that_of_the_other_direction(a, b):
    """E_pi[k3] = KL(pi || ref). As a loss on samples, its expected gradient is the one of KL(ref || pi)."""
    logits, ref = torch.tensor(a, dtype=torch.float64, requires_grad=True), torch.tensor(b, dtype=torch.float64)
    logp, logq = logits.log_softmax(-1), ref.log_softmax(-1)
    p, q = logp.exp().detach(), logq.exp()
    k3 = kl_k3(logp, logq)
    close((p * k3).sum(), (p * (logp - logq)).sum(), 1e-9)
    sampled = torch.autograd.grad((p * k3).sum(), logits, retain_graph=True)[0]  # the samples' weights do not move
    close(sampled, torch.autograd.grad((q * (logq - logp)).sum(), logits)[0], 1e-9)


# -- dead tokens, empty batches, extreme numbers -------------------------------------------------------------------


@every_kind
@every_normalization
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 0.0])
def test_nothing_in_a_dead_position_matters(kind, normalization, beta, junk):
    logprobs, old, advantages, mask, ref = batch()
    options = dict(kind=kind, normalization=normalization, beta=beta, max_length=9)
    want, want_stats = policy_loss(logprobs, old, advantages, mask, ref_logprobs=ref, **options)
    want_gradient = torch.autograd.grad(want, logprobs)[0]
    dirty = [x.detach().masked_fill(~mask, junk) for x in (logprobs, old, ref)]
    dirty[0].requires_grad_()
    loss, stats = policy_loss(dirty[0], dirty[1], advantages, mask.float(), ref_logprobs=dirty[2], **options)
    assert loss == want and stats == want_stats
    gradient = torch.autograd.grad(loss, dirty[0])[0]
    assert torch.equal(gradient, want_gradient) and (gradient[~mask] == 0).all()


@every_kind
@every_normalization
@pytest.mark.parametrize("junk", [NAN, INF, -INF, -1.0])
@pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4)])
def test_a_batch_without_a_live_token_gives_zero_loss_and_zero_gradient(kind, normalization, junk, shape):
    logprobs = torch.full(shape, junk, requires_grad=True)
    loss, stats = policy_loss(logprobs, torch.full(shape, junk), torch.full(shape[:1], junk), torch.zeros(shape),
                              kind=kind, normalization=normalization, beta=0.1, ref_logprobs=torch.full(shape, junk),
                              max_length=4)
    assert loss.item() == 0.0 and stats == {"clip_share": 0.0, "ratio_max": 1.0, "kl": 0.0}
    assert torch.equal(torch.autograd.grad(loss, logprobs)[0], torch.zeros(shape))


@every_normalization
def test_a_rollout_without_a_live_token_is_as_if_it_were_not_there(normalization):
    logprobs, old, advantages, mask, _ = batch()
    options = dict(normalization=normalization, max_length=9)
    keep = torch.tensor([True, False, True, True, False])
    dropped = mask & keep[:, None]
    advantages[1] = NAN  # its grader failed
    loss, _ = policy_loss(logprobs, old, advantages, dropped, **options)
    want, _ = policy_loss(logprobs[keep], old[keep], advantages[keep], mask[keep], **options)
    close(loss, want)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(data=st.data())
def test_extreme_gaps_keep_loss_and_gradient_finite(kind, dtype, data):
    numbers = st.lists(st.floats(-1e4, 0), min_size=3, max_size=3)
    logprobs, old, ref = (torch.tensor([data.draw(numbers)], dtype=dtype) for _ in range(3))
    advantage = torch.tensor([data.draw(st.floats(-100, 100))])
    loss, stats = policy_loss(logprobs.requires_grad_(), old, advantage, torch.ones(1, 3), kind=kind, beta=0.1,
                              ref_logprobs=ref)
    assert loss.isfinite() and loss.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.autograd.grad(loss, logprobs)[0].isfinite().all()
    assert all(map(math.isfinite, stats.values()))


def test_the_old_policy_the_reference_and_the_advantages_get_no_gradient():
    logprobs, old, advantages, mask, ref = batch()
    for x in (old, advantages, ref):
        x.requires_grad_()
    loss, _ = policy_loss(logprobs, old, advantages, mask, beta=0.1, ref_logprobs=ref)
    assert [g is None for g in torch.autograd.grad(loss, [logprobs, old, advantages, ref], allow_unused=True)] == [
        False, True, True, True]


# -- micro-batches -------------------------------------------------------------------------------------------------


@every_kind
@every_normalization
@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_with_the_common_denominator_add_up_to_the_batch(kind, normalization, seed, cuts):
    logprobs, old, advantages, mask, ref = batch(seed)
    options = dict(kind=kind, normalization=normalization, beta=0.2, max_length=9)
    whole, _ = policy_loss(logprobs, old, advantages, mask, ref_logprobs=ref, **options)
    gradient = torch.autograd.grad(whole, logprobs)[0]
    denominator = loss_denominator(mask, normalization, 9)
    edges = [0, *sorted(cuts), 5]
    parts = [policy_loss(logprobs[a:b], old[a:b], advantages[a:b], mask[a:b], ref_logprobs=ref[a:b],
                         denominator=denominator, **options)[0] for a, b in zip(edges, edges[1:])]
    close(sum(parts), whole)
    close(sum(torch.autograd.grad(part, logprobs, retain_graph=True)[0] for part in parts), gradient)


def test_the_mean_of_micro_batch_means_is_another_loss():
    """One long good rollout and three short bad ones: 8 of 11 tokens push up, in the mean of means it is half."""
    mask = torch.arange(8) < torch.tensor([[8], [1], [1], [1]])
    logprobs = torch.zeros(4, 8, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0], dtype=torch.float64)

    def loss(rows, **options):
        return policy_loss(logprobs[rows], logprobs[rows].detach(), advantages[rows], mask[rows], **options)[0]

    halves = [slice(0, 1), slice(1, 4)]
    total = loss_denominator(mask)
    close(loss(slice(0, 4)), -5 / 11)
    close(sum(loss(rows, denominator=total) for rows in halves), -5 / 11)
    close(sum(loss(rows) for rows in halves) / 2, 0.0)


@every_kind
@every_normalization
@given(seed=st.integers(0, 1000), extra=st.integers(1, 4), order=st.permutations(range(5)))
def test_padding_and_the_order_of_the_rollouts_do_not_matter(kind, normalization, seed, extra, order):
    logprobs, old, advantages, mask, ref = batch(seed)
    options = dict(kind=kind, normalization=normalization, beta=0.2, max_length=20)
    want, _ = policy_loss(logprobs, old, advantages, mask, ref_logprobs=ref, **options)
    wide = [torch.nn.functional.pad(x[order], (0, extra)) for x in (logprobs, old, mask, ref)]
    got, _ = policy_loss(wide[0], wide[1], advantages[order], wide[2], ref_logprobs=wide[3], **options)
    close(got, want)


@every_kind
@given(seed=st.integers(0, 1000), scale=st.floats(0, 100))
def test_the_loss_scales_with_the_advantages(kind, seed, scale):
    logprobs, old, advantages, mask, _ = batch(seed)
    once, _ = policy_loss(logprobs, old, advantages, mask, kind=kind)
    close(policy_loss(logprobs, old, scale * advantages, mask, kind=kind)[0], scale * once, 1e-9)


@given(seed=st.integers(0, 1000))
def test_the_clipped_surrogate_never_promises_more_than_the_unclipped_one(seed):
    logprobs, old, advantages, mask, _ = batch(seed)
    clipped, _ = policy_loss(logprobs, old, advantages, mask)
    free, _ = policy_loss(logprobs, old, advantages, mask, clip_low=1.0, clip_high=1e9)
    assert clipped >= free - 1e-12


def test_a_cut_off_completion_stays_in_numerator_and_denominator():
    """EOS = 9: row 0 ends at its EOS, row 1 is cut by the length limit; both sides of the fraction count its tokens."""
    mask = completion_mask(torch.tensor([[5, 5, 9, 9], [5, 5, 5, 5]]), 9)
    assert mask.sum(-1).tolist() == [3, 4]
    logprobs = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -1.0]), mask)
    close(loss, 1 / 7)
    close(torch.autograd.grad(loss, logprobs)[0], [[-1 / 7] * 3 + [0.0], [1 / 7] * 4])


# -- what is logged, what is refused -------------------------------------------------------------------------------


def test_stats_are_means_over_live_tokens():
    logprobs = torch.log(torch.tensor([[1.0, 2.0, 9.0], [0.5, 1.0, 9.0]], dtype=torch.float64))
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    ref = logprobs + 0.1
    _, stats = policy_loss(logprobs, torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, beta=0.5, ref_logprobs=ref)
    assert stats["clip_share"] == 0.5 and stats["ratio_max"] == pytest.approx(2.0)
    assert stats["kl"] == pytest.approx(math.exp(0.1) - 0.1 - 1)


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": "ppo"}, "unknown loss kind 'ppo'; choose one of clip, cispo"),
    ({"normalization": "tokens"}, "unknown normalization 'tokens'; choose one of token, sequence, constant"),
    ({"normalization": "tokens", "denominator": 3.0}, "unknown normalization 'tokens'"),
    ({"normalization": "constant"}, "needs max_length >= 1, got None"),
    ({"normalization": "constant", "max_length": 0}, "needs max_length >= 1, got 0"),
    ({"clip_low": -0.1}, r"must be >= 0, got -0.1 and 0.28"),
    ({"clip_high": NAN}, r"must be >= 0, got 0.2 and nan"),
    ({"beta": -1.0}, "beta=-1.0 needs to be >= 0"),
    ({"beta": NAN}, "beta=nan needs to be >= 0"),
    ({"beta": 0.1}, "and ref_logprobs when it is above 0"),
    ({"beta": 0.1, "ref_logprobs": torch.zeros(2, 2)}, r"ref_logprobs \(2, 2\)"),
    ({"denominator": 0.0}, "denominator must be a finite number above 0, got 0.0"),
    ({"advantages": torch.zeros(2, 3)}, r"advantages must be \[2\], one per rollout, got \(2, 3\)"),
    ({"mask": torch.ones(2, 1)}, r"mask \(2, 1\) must have one shape"),
    ({"old_logprobs": torch.zeros(3)}, r"old_logprobs \(3,\)"),
    (dict.fromkeys(["logprobs", "old_logprobs", "mask"], torch.ones(2)), r"logprobs \(2,\).* one shape \[rollouts"),
    (dict.fromkeys(["logprobs", "old_logprobs", "mask"], torch.ones(2, 3, 2)), r"logprobs \(2, 3, 2\).* one shape"),
    ({"advantages": torch.tensor([1.0, NAN])}, "advantages must be finite .*got nan at index 1"),
    ({"advantages": torch.tensor([-INF, 1.0])}, "advantages must be finite .*got -inf at index 0"),
])
def test_a_wrong_argument_is_named(change, message):
    arguments = dict(logprobs=torch.zeros(2, 3), old_logprobs=torch.zeros(2, 3), advantages=torch.zeros(2),
                     mask=torch.ones(2, 3)) | change
    with pytest.raises(UserError, match=message):
        policy_loss(**arguments)


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 1), ()])
def test_k3_does_not_broadcast(shape):
    with pytest.raises(UserError, match=r"logprobs \(2, 3\) and ref_logprobs .* one shape"):
        kl_k3(torch.zeros(2, 3), torch.zeros(shape))


def test_denominators():
    mask = torch.arange(8) < torch.tensor([[8], [1], [0]])
    assert [loss_denominator(mask, n, 10) for n in NORMALIZATIONS] == [9.0, 2.0, 20.0]
    assert [loss_denominator(torch.zeros(3, 4), n, 10) for n in NORMALIZATIONS] == [1.0, 1.0, 10.0]


# -- log-probabilities in chunks -----------------------------------------------------------------------------------


class Head(torch.nn.Linear):
    """A vocabulary head that notes how many tokens it sees at a time."""

    def __init__(self, dtype=torch.float32):
        super().__init__(5, 11, bias=True, dtype=dtype)
        self.rows: list[int] = []

    def forward(self, hidden):
        self.rows.append(hidden.shape[0])
        return super().forward(hidden)


def hidden_and_targets(n, dtype=torch.float32):
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, 5, generator=g).to(dtype).requires_grad_()
    return hidden, torch.randint(0, 11, (n,), generator=g)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_are_log_softmax_with_its_gradient_across_their_borders(n, temperature):
    torch.manual_seed(0)
    head, (hidden, targets) = Head(), hidden_and_targets(n)
    scale = torch.linspace(1, 2, n)
    got = chunked_logprobs(hidden, head, targets, temperature=temperature, chunk=4)
    got_gradients = torch.autograd.grad((got * scale).sum(), [hidden, head.weight, head.bias])
    whole = (head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    want_gradients = torch.autograd.grad((whole * scale).sum(), [hidden, head.weight, head.bias])
    close(got, whole, 1e-5)
    for a, b in zip(got_gradients, want_gradients):
        close(a, b, 1e-5)


@pytest.mark.parametrize("frozen", ["nothing", "hidden", "head"])
def test_no_more_than_a_chunk_of_logits_at_a_time_and_recomputed_in_the_backward_pass(frozen):
    head, (hidden, targets) = Head(), hidden_and_targets(10)
    if frozen == "hidden":
        hidden = hidden.detach()
    if frozen == "head":
        head.requires_grad_(False)
    out = chunked_logprobs(hidden, head, targets, chunk=4)
    assert head.rows == [4, 4, 2]
    out.sum().backward()
    assert sorted(head.rows[3:]) == [2, 4, 4]
    with torch.no_grad():
        again = chunked_logprobs(hidden, head, targets, chunk=4)
    assert torch.equal(again, out.detach()) and not again.requires_grad


def test_logprobs_are_float32_whatever_the_model_is():
    torch.manual_seed(0)
    head, (hidden, targets) = Head(torch.bfloat16), hidden_and_targets(6, torch.bfloat16)
    got = chunked_logprobs(hidden, head, targets, chunk=4)
    assert got.dtype is torch.float32
    want = head(hidden).double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    close(got.double(), want, 1e-6)


def test_without_the_sampling_temperature_the_first_ratio_is_not_one():
    head, (hidden, targets) = Head(), hidden_and_targets(8)
    sampled = chunked_logprobs(hidden, head, targets, temperature=0.6).detach()
    same = chunked_logprobs(hidden, head, targets, temperature=0.6)
    forgotten = chunked_logprobs(hidden, head, targets)
    assert torch.equal((same - sampled).exp(), torch.ones(8))
    assert ((forgotten - sampled).exp() - 1).abs().max() > 0.05


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("shape", [(3,), (1,), (6,), (5, 1), (0,)])
def test_targets_that_do_not_match_the_hidden_states_are_refused(shape, chunk):
    """zip would cut the longer one off, gather would repeat the shorter one: plausible wrong numbers."""
    hidden, _ = hidden_and_targets(5)
    with pytest.raises(UserError, match=r"hidden \(5, 5\) must be \[tokens, width\] and targets"):
        chunked_logprobs(hidden, Head(), torch.zeros(shape, dtype=torch.long), chunk=chunk)
    with pytest.raises(UserError, match=r"hidden \(1, 5, 5\) must be"):
        chunked_logprobs(hidden[None], Head(), torch.zeros(1, dtype=torch.long), chunk=chunk)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": NAN}, {"chunk": 0},
                                     {"chunk": 2.5}])
def test_a_temperature_or_chunk_that_is_not_positive_is_refused(options):
    hidden, targets = hidden_and_targets(3)
    with pytest.raises(UserError, match="|".join(options)):
        chunked_logprobs(hidden, Head(), targets, **options)
