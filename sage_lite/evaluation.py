"""What a policy can do: unbiased pass@k and greedy accuracy, each with its bootstrap interval over problems."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t as student

from sage_lite.checks import array, whole
from sage_lite.errors import UserError
from sage_lite.oom import Limit
from sage_lite.policy import Policy
from sage_lite.rewards import score_all
from sage_lite.rollout import rows_at_once, sample
from sage_lite.tasks import Task

EXACT = 10_000  # samples up to which pass@k is computed in integers


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from c right among n: `1 - C(n-c, k) / C(n, k)`.

    Raises UserError unless they are whole numbers, 0 <= c <= n and 1 <= k <= n. Source: Chen et al., arXiv 2107.03374,
    eq. 1.
    """
    try:
        n, c, k = map(operator.index, (n, c, k))
    except TypeError:
        raise UserError(f"pass_at_k needs whole numbers, one of each, got n={n!r}, c={c!r}, k={k!r}") from None
    if not (0 <= c <= n and 1 <= k <= n):
        raise UserError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n > EXACT:
        return _pass_at_k_of_many(n, c, k)
    # Integers are exact at any size; a ratio of factorials in floats overflows from n = 171 on.
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _pass_at_k_of_many(n: int, c: int, k: int) -> float:
    """The same for large n, to rounding: C(n-c, k) / C(n, k) is the product of 1 - a/(n-i) over i < b, with {a, b} =
    {c, k} and b the smaller."""
    # The product is at most (1 - a/n)^b <= e^(-ab/n): from e^-40 on, 1 minus it is 1 in a double. So b^2 < 40 n below.
    if c + k > n or c * k > 40 * n:
        return 1.0
    a, b = max(c, k), min(c, k)
    return float(-np.expm1(np.log1p(-a / (float(n) - np.arange(b))).sum()))


@dataclass(frozen=True)
class Interval:
    """An estimate with the 95 % bootstrap interval around it; low and high are NaN where there is none."""

    value: float
    low: float
    high: float

    @property
    def bounds(self) -> list[float | None]:
        """[low, high] for JSON, which has no NaN: None stands for it."""
        return [None if math.isnan(x) else x for x in (self.low, self.high)]

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values, statistic=np.mean, *, resamples: int = 1000, seed: int = 0) -> Interval:
    """Percentile bootstrap over the first axis of `values` (the problems): 2.5 % to 97.5 % of the resampled statistic.

    values: [N] or [N, ...], array, tensor or list; statistic maps such an array to a number. Speaks of other problems,
    not of other seeds. One problem says nothing of others: for N = 1, low and high are NaN. Raises UserError for what
    is no array of numbers, values that are not finite (a caller that wants some left out drops them first), no value at
    all, or resamples < 1.
    """
    try:
        values = array(values)
    except (TypeError, ValueError) as error:
        raise UserError(f"bootstrap needs an array of numbers: {error}") from None
    if values.ndim == 0 or len(values) == 0:
        raise UserError(f"bootstrap needs an array of at least one value, got shape {values.shape}")
    if not np.isfinite(values).all():
        index = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
        where = index[0] if len(index) == 1 else index
        raise UserError(f"bootstrap needs finite values, got {values[index]} at index {where}: drop that problem first")
    resamples = whole("resamples", resamples, 1)
    if len(values) == 1:
        return Interval(float(statistic(values)), math.nan, math.nan)
    rng = np.random.default_rng(seed)
    draws = [statistic(values[rng.integers(0, len(values), len(values))]) for _ in range(resamples)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Interval(float(statistic(values)), float(low), float(high))


def over_seeds(values) -> Interval:
    """Mean over seeds, one value each, and its 95 % interval by Student's t. Raises UserError for fewer than two."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        raise UserError(f"an interval over seeds needs at least two runs, got {len(values)}")
    mean, half = values.mean(), student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return Interval(float(mean), float(mean - half), float(mean + half))


@dataclass
class Evaluation:
    """Right answers per problem: `right[i]` of the `samples[i]` samples that could be graded; greedy[i] is 0 or 1, NaN
    where that answer could not be graded, and greedy is None where it was not asked for. scores [N, samples] and
    greedy_scores [N] are the rewards themselves, NaN likewise."""

    right: np.ndarray
    samples: np.ndarray
    greedy: np.ndarray | None
    texts: list[list[str]]
    scores: np.ndarray | None = None
    greedy_scores: np.ndarray | None = None

    @property
    def pass_rate(self) -> np.ndarray:
        """Estimated p of each problem, [N]; NaN for a problem of which no sample could be graded."""
        return np.where(self.samples > 0, self.right / np.maximum(self.samples, 1), np.nan)

    def pass_at(self, k: int) -> Interval:
        """pass@k over the problems, with its interval; problems with fewer than k scored samples are left out."""
        enough = self.samples >= k
        if not enough.any():
            raise UserError(f"pass@{k} needs at least {k} scored samples a problem, got at most {self.samples.max()}")
        return bootstrap([pass_at_k(int(n), int(c), k) for n, c in zip(self.samples[enough], self.right[enough])])

    @property
    def graded(self) -> bool:
        """Whether some reward is neither 0 nor 1, so that the share of right answers does not say all."""
        known = [s[~np.isnan(s)] for s in (self.scores, self.greedy_scores) if s is not None]
        return any(not np.isin(s, (0.0, 1.0)).all() for s in known)

    def mean_reward(self) -> Interval:
        """Mean reward of the samples, over the problems, with its interval; what could not be graded is left out."""
        return _mean(self.scores)

    def mean_greedy_reward(self) -> Interval:
        """The same of the greedy answers. Raises UserError where they were not asked for."""
        return _mean(self.greedy_scores)


def _mean(scores: np.ndarray | None) -> Interval:
    """Mean over problems of each one's mean score, [N] or [N, samples], NaN left out, with its interval."""
    if scores is None:
        raise UserError("there are no rewards of these answers: evaluate(..., greedy=True) asks for the greedy ones")
    table = scores.reshape(len(scores), -1)
    return bootstrap([float(np.nanmean(row)) for row in table if not np.isnan(row).all()])


def evaluate(
    policy: Policy,
    task: Task,
    rows: list[dict] | None = None,
    *,
    samples: int = 16,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    greedy: bool = False,
    seed: int = 0,
    prompts_per_batch: int = 128,
) -> Evaluation:
    """Sample every problem (default: the task's test rows) and count the right answers, reward >= 1 being right.

    A scorer that fails for a completion takes that sample out of the count, and makes that greedy answer NaN.
    """
    rows = task.test if rows is None else rows
    if not rows:
        raise UserError(f"task {task.name!r} has no problem to evaluate on")
    style = policy.prompt_style if policy.prompt_style in task.styles else task.styles[0]
    prompts = policy.encode([task.prompt(row, style) for row in rows])
    length = max_new_tokens or task.default_max_new_tokens(style)
    most, tokens = prompts_per_batch * samples, max(len(p) for p in prompts) + length
    limit = Limit("rollout_batch", min(most, rows_at_once(policy.causal_lm.config, tokens, policy.device) or most))
    settings = {"max_new_tokens": length, "top_p": top_p, "rollout_batch": limit}
    generator = torch.Generator(policy.device).manual_seed(seed)
    texts, greedy_texts = [], []
    for start in range(0, len(rows), prompts_per_batch):
        batch = prompts[start : start + prompts_per_batch]
        drawn = sample(policy, batch, samples, temperature=temperature, generator=generator, **settings).texts
        texts += [drawn[i : i + samples] for i in range(0, len(drawn), samples)]
        if greedy:
            greedy_texts += sample(policy, batch, 1, temperature=0.0, **settings).texts
    flat, _, _ = score_all(
        task.score, [t for group in texts for t in group], [row for row in rows for _ in range(samples)]
    )
    scores = np.array([np.nan if r is None else r for r in flat], dtype=np.float64).reshape(len(rows), samples)
    best = best_scores = None
    if greedy:
        best_rewards, _, _ = score_all(task.score, greedy_texts, rows)
        best_scores = np.array([np.nan if r is None else r for r in best_rewards], dtype=np.float64)
        best = np.where(np.isnan(best_scores), np.nan, best_scores >= 1.0)
    return Evaluation((scores >= 1.0).sum(-1), (~np.isnan(scores)).sum(-1), best, texts, scores, best_scores)
