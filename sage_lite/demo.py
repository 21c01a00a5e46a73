"""The main job: train the embedded model with GRPO and with SAGE from one start, and lay the two side by side."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sage_lite import advantages, theory
from sage_lite.budget import GradientBudget, gradient_budget
from sage_lite.errors import UserError
from sage_lite.evaluation import Evaluation, Interval, bootstrap, evaluate, over_seeds, pass_at_k
from sage_lite.folders import latest
from sage_lite.policy import Policy, load_policy
from sage_lite.provenance import made_by
from sage_lite.recipes import recipe
from sage_lite.runlog import read_lines
from sage_lite.tasks import Task, load_task
from sage_lite.trainer import TrainConfig, train

METHODS = ("grpo", "sage")
SAMPLES = 16


@dataclass
class Measured:
    """What is known of one model: held-out problems, training pool, gradient budget, and the seconds its training
    took."""

    test: Evaluation
    pool: Evaluation
    budget: GradientBudget
    seconds: float
    metrics: list[dict[str, Any]]


def run_demo(
    out: str | Path = "runs/demo",
    *,
    steps: int = 300,
    seeds: int = 1,
    pool_size: int = 1024,
    test_rows: int = 400,
    budget_rows: int = 200,
    progress: bool = True,
) -> dict[str, Any]:
    """Train GRPO and SAGE (tau 0.1) with the same seed, prompts, rollouts a step and steps; write and print the
    comparison.

    Leaves in `out`: summary.json, demo.png and a folder a run with metrics.jsonl, completions.jsonl and its checkpoint.
    Runs that an interrupted demo left there go on. Returns what summary.json holds, NaN where that has null. Raises
    UserError where `out` already holds a whole demo, or runs of other settings; KeyboardInterrupt after Ctrl-C.
    """
    out = Path(out).expanduser()
    if (out / "summary.json").exists():
        raise UserError(f"{out} already holds a demo: choose another folder with --out")
    configs = [
        TrainConfig(
            method=method, steps=steps, seed=seed, out=str(out / f"{method}-seed{seed}"), lr=2e-4, progress=progress,
            checkpoint_every=max(steps, 1), keep_checkpoints=1, task_options={"pool_size": pool_size},
        )
        for seed in range(seeds)
        for method in METHODS
    ]  # fmt: skip
    for config in configs:
        config.resume = _begun(config)
    out.mkdir(parents=True, exist_ok=True)
    task = load_task("countdown", pool_size=pool_size)
    functions = {m: advantages.get(recipe(m).advantage, **recipe(m).advantage_params) for m in METHODS}
    size = {"test_rows": test_rows, "budget_rows": budget_rows}
    print("Start: measuring the embedded model before any training …", flush=True)
    start = _measure(load_policy(), task, functions, 0.0, [], **size)
    runs: dict[str, list[Measured]] = {m: [] for m in METHODS}
    for config in configs:
        result = train(config, task=task)
        metrics = read_lines(result.out / "metrics.jsonl")
        if result.stopped_early:
            done = f"stopped after {len(metrics)} of {steps} steps of {config.method}, seed {config.seed}"
            raise KeyboardInterrupt(f"{done}; the same command goes on from there")
        seconds = sum(line["seconds"] for line in metrics) if config.resume else result.seconds
        runs[config.method].append(_measure(result.policy, task, functions, seconds, metrics, **size))
    summary = _summary(start, runs, steps, seeds)
    (out / "summary.json").write_text(json.dumps(_null_for_nan(summary), indent=1, allow_nan=False) + "\n")
    figure(start, runs).savefig(out / "demo.png", dpi=110)
    print("\n" + table(summary), "\n" + in_words(start, runs, summary), sep="\n")
    print(
        f"\nFiles: {out}/summary.json, {out}/demo.png, and metrics.jsonl, completions.jsonl in "
        + ", ".join(f"{out}/{m}-seed{s}" for m in METHODS for s in range(seeds))
    )
    return summary


def _begun(config: TrainConfig) -> bool:
    """Whether the folder of a run holds a checkpoint of it; UserError where that is one of other settings."""
    folder = Path(config.out)
    if latest(folder / "checkpoints") is None:
        return False
    try:
        before = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot go on with the run in {folder}, its config.json is missing or damaged: choose another "
                        "folder with --out") from error  # fmt: skip
    for name in ("steps", "task_options"):
        if before.get(name) != getattr(config, name):
            raise UserError(
                f"{folder} holds a run of an interrupted demo with {name}={before.get(name)}, not "
                f"{getattr(config, name)}: go on with the same settings, or choose another folder with --out"
            )
    return True


def _null_for_nan(value: Any) -> Any:
    """The same for JSON, which has no NaN: None stands for it."""
    if isinstance(value, dict):
        return {name: _null_for_nan(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_null_for_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _measure(
    policy: Policy, task: Task, functions, seconds: float, metrics, *, test_rows: int, budget_rows: int
) -> Measured:
    began = time.perf_counter()
    test = evaluate(policy, task, task.test[:test_rows], samples=SAMPLES, seed=1)
    pool = evaluate(policy, task, task.train, samples=SAMPLES, seed=2)
    budget = gradient_budget(policy, task, task.train[:budget_rows], functions, seed=3)
    return Measured(test, pool, budget, seconds or time.perf_counter() - began, metrics)


def _summary(start: Measured, runs: dict[str, list[Measured]], steps: int, seeds: int) -> dict[str, Any]:
    rows = {"start": _row([start], "grpo")} | {m: _row(runs[m], m) for m in METHODS}
    settings = {"steps": steps, "seeds": seeds, "group_size": 8, "batch_size": 64}
    return {**rows, **settings, "made_by": made_by(f"sage-lite demo --steps {steps} --seeds {seeds}")}


def _row(measured: list[Measured], own: str) -> dict[str, Any]:
    """One row of the table: means over seeds, intervals over seeds where there are several, else over problems."""
    values = {
        "pass@1": [m.test.pass_at(1) for m in measured],
        f"pass@{SAMPLES}": [m.test.pass_at(SAMPLES) for m in measured],
        "pool_pass@1": [m.pool.pass_at(1) for m in measured],
        f"pool_pass@{SAMPLES}": [m.pool.pass_at(SAMPLES) for m in measured],
        "budget_hi": [m.budget.shares(own)[-1] for m in measured],
    }
    row: dict[str, Any] = {}
    for name, found in values.items():
        shown = found[0] if len(found) == 1 else over_seeds([f.value for f in found])
        row[name], row[f"{name}_interval"] = shown.value, [shown.low, shown.high]
    for method in METHODS:
        row[f"budget_hi_{method}"] = float(np.mean([m.budget.shares(method)[-1].value for m in measured]))
    row["share_p_hi"] = float(np.mean([(_known(m.pool.pass_rate) >= 0.9).mean() for m in measured]))
    row["seconds"] = float(np.mean([m.seconds for m in measured]))
    return row


def _known(rates: np.ndarray) -> np.ndarray:
    """Without the problems of which no sample could be graded."""
    return rates[~np.isnan(rates)]


def table(summary: dict[str, Any]) -> str:
    """The comparison as plain text, one line a model."""
    lines = [
        f"{'':<6} {'pass@1':>22} {f'pass@{SAMPLES}':>22} {'budget on p >= .9':>22} {'pool pass@1':>22} {'seconds':>8}"
    ]
    for name in ("start", *METHODS):
        row = summary[name]
        cells = [
            f"{row[k]:.3f} [{row[f'{k}_interval'][0]:.3f}, {row[f'{k}_interval'][1]:.3f}]"
            for k in ("pass@1", f"pass@{SAMPLES}", "budget_hi", "pool_pass@1")
        ]
        lines.append(
            f"{name.upper() if name != 'start' else name:<6} "
            + " ".join(f"{c:>22}" for c in cells)
            + f" {row['seconds']:>8.0f}"
        )
    over = "seeds (Student t)" if summary["seeds"] > 1 else "problems (bootstrap), not over seeds"
    lines.append(
        f"95 % intervals over {over}. Budget: each model's share of its own method's gradient (start: GRPO's)."
    )
    return "\n".join(lines)


def paired(first: list[Evaluation], second: list[Evaluation], k: int) -> Interval:
    """pass@k of `second` minus `first`: over seeds where there are several, else over the problems both were asked."""
    if len(first) > 1:
        return over_seeds([b.pass_at(k).value - a.pass_at(k).value for a, b in zip(first, second)])
    a, b = first[0], second[0]
    return bootstrap(
        [pass_at_k(n2, c2, k) - pass_at_k(n1, c1, k) for n1, c1, n2, c2 in
         zip(a.samples.tolist(), a.right.tolist(), b.samples.tolist(), b.right.tolist()) if min(n1, n2) >= k]
    )  # fmt: skip


def in_words(start: Measured, runs: dict[str, list[Measured]], summary: dict[str, Any]) -> str:
    """What the numbers say, and what they cannot say, from the numbers of this very run."""
    lines = ["In words:"]
    for where in ("test", "pool"):
        grpo, sage = ([getattr(m, where) for m in runs[method]] for method in METHODS)
        place = "held-out problems" if where == "test" else "training pool"
        for k in (1, SAMPLES):
            d = paired(grpo, sage, k)
            verdict = (
                "SAGE is ahead"
                if d.low > 0
                else "GRPO is ahead"
                if d.high < 0
                else "no difference that this run can show"
            )
            lines.append(
                f"- {place}, pass@{k}: SAGE minus GRPO {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]: {verdict}."
            )
    for name in METHODS:
        row = summary[name]
        lines.append(
            f"- On the {name.upper()} model, problems with p >= .9 are {row['share_p_hi']:.0%} of the pool; "
            f"GRPO would spend {row['budget_hi_grpo']:.0%} of its gradient on them, SAGE {row['budget_hi_sage']:.0%}."
        )
    lines.append(
        "- GRPO's weight w(p) rises again towards p = 1, SAGE's stays near 1 there: "
        "that is the whole difference in the code."
    )
    if summary["seeds"] == 1:
        lines.append(
            "- One seed cannot show which method is better: the intervals cover other problems, not other runs. "
            "Use --seeds 5 for intervals over seeds."
        )
    return "\n".join(lines)


def figure(start: Measured, runs: dict[str, list[Measured]]):
    """Learning curves, histograms of p on the training pool, and the two prompt weights, as one matplotlib figure."""
    from sage_lite import plots

    fig, (curves, histogram, weights) = plots.new_figure(1, 3, width=4.6, height=3.8)
    for method in METHODS:
        rates = np.array([[line["pass_rate"] for line in m.metrics] for m in runs[method]]).mean(0)
        window = min(20, len(rates))
        smooth = np.convolve(rates, np.ones(window) / window, mode="valid")
        curves.plot(np.arange(window, len(rates) + 1), smooth, **plots.style(method))
    curves.set(title="Training", xlabel="step", ylabel="pass rate of the rollouts (mean of 20 steps)")
    curves.legend()
    edges = np.linspace(0, 1, 11)
    for name, found in [("start", [start]), *runs.items()]:
        rates = _known(np.concatenate([m.pool.pass_rate for m in found]))
        histogram.stairs(
            np.histogram(rates, edges)[0] / len(rates),
            edges,
            color=plots.COLORS[name],
            label=plots.LABELS[name],
            linewidth=2,
        )
    histogram.set(title="Problems by pass rate", xlabel="pass rate p on the training pool", ylabel="share of problems")
    histogram.legend()
    p = np.linspace(0, 1, 201)
    for method in METHODS:
        function = advantages.get(recipe(method).advantage, **recipe(method).advantage_params)
        weights.plot(p, theory.prompt_weight(function, p, 8), **plots.style(method))
    weights.set(title="Prompt weight, group size 8", xlabel="pass rate p", ylabel="w(p)", ylim=(0, None))
    weights.legend()
    return fig
