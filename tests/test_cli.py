from __future__ import annotations

import json

import numpy as np
import pytest
from small_models import small_policy

from sage_lite import demo
from sage_lite.cli import main
from sage_lite.evaluation import Evaluation
from sage_lite.runlog import read_lines
from sage_lite.trainer import TrainConfig


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [{"nums": [30 + i, 5, 93], "target": 128 + i} for i in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_train_then_resume_then_evaluate_on_a_file(data, tmp_path, capsys):
    out = tmp_path / "run"
    options = [
        "--data",
        data,
        "--task-options",
        '{"test_size": 4}',
        "--out",
        str(out),
        "--batch-size",
        "4",
        "--no-progress",
    ]
    assert main(["train", "--task", "countdown", "--steps", "2", "--tau", "0.3", *options]) == 0
    printed = capsys.readouterr().out
    assert "metrics.jsonl" in printed and "reward" in printed
    assert json.loads((out / "config.json").read_text())["advantage_params"] == {"tau": 0.3}
    assert main(["train", "--task", "countdown", "--steps", "3", "--tau", "0.3", "--resume", *options]) == 0
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == [1, 2, 3]
    model = str(out / "checkpoints" / "step-000003")
    capsys.readouterr()
    asked = ["evaluate", "--model", model, "--data", data, "--rows", "4", "--samples", "4", "--k", "1", "4"]
    assert main([*asked, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert 0 <= numbers["pass@1"]["value"] <= numbers["pass@4"]["value"] <= 1
    assert main(asked) == 0 and "pass@4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, message",
    [
        (["train", "--task", "chess"], "chess"),
        (["train", "--method", "gropo"], "unknown method 'gropo'"),
        (["train", "--data", "missing.jsonl"], "missing.jsonl"),
        (["train", "--tau", "0"], "tau"),
        (["evaluate", "--k", "32"], "--samples"),
        (["evaluate", "--model", "./no/such/folder"], "no model folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("sage-lite: ") and message in captured.err and "Traceback" not in captured.err
    assert captured.err.count("\n") == 1 and not list(tmp_path.rglob("metrics.jsonl"))


def test_every_setting_of_a_run_is_an_option(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    import dataclasses

    assert all("--" + f.name.replace("_", "-") in shown for f in dataclasses.fields(TrainConfig))


def test_doctor_prints_its_report(capsys):
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


def test_short_demo_leaves_summary_figure_and_runs(tmp_path, capsys):
    assert main(["demo", "--short", "--out", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    for name in ("start", "grpo", "sage"):
        row = summary[name]
        assert {"pass@1", "pass@16", "budget_hi", "seconds"} <= set(row) and row["pass@1"] <= row["pass@16"]
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
    for method in ("grpo", "sage"):
        assert len(read_lines(tmp_path / "demo" / f"{method}-seed0" / "metrics.jsonl")) == 3
    assert "One seed cannot show" in printed and "demo.png" in printed and "SAGE minus GRPO" in printed
    assert main(["demo", "--short", "--out", str(tmp_path / "demo")]) == 2
    assert "already holds a demo" in capsys.readouterr().err


def test_both_methods_of_the_demo_see_the_same_first_rollouts(tmp_path):
    demo.run_demo(tmp_path / "demo", steps=1, pool_size=64, test_rows=8, budget_rows=4, progress=False)
    first = [read_lines(tmp_path / "demo" / f"{m}-seed0" / "metrics.jsonl")[0] for m in demo.METHODS]
    for key in ("reward", "pass_rate", "dead_groups", "length", "cut_off"):
        assert first[0][key] == first[1][key]
    assert first[0]["grad_norm"] != first[1]["grad_norm"]


def _measured(right: list[int], budget_rates=(0.1, 0.95)) -> demo.Measured:
    found = Evaluation(np.array(right), np.full(len(right), 16), None, [])
    rates = np.array(budget_rates)
    norms = {m: np.ones((len(rates), 1)) for m in demo.METHODS}
    return demo.Measured(found, found, demo.GradientBudget(rates, norms), 1.0, [{"pass_rate": 0.1}])


def test_the_words_follow_the_numbers_both_ways():
    low, high = [1] * 30 + [2] * 30, [9] * 30 + [10] * 30
    for grpo, sage, verdict in [
        (low, high, "SAGE is ahead"),
        (high, low, "GRPO is ahead"),
        (low, low, "no difference"),
    ]:
        runs = {"grpo": [_measured(grpo)], "sage": [_measured(sage)]}
        words = demo.in_words(_measured(low), runs, demo._summary(_measured(low), runs, 1, 1))
        assert verdict in words.splitlines()[1] and "One seed cannot show" in words


def test_with_several_seeds_intervals_are_over_seeds():
    runs = {"grpo": [_measured([4] * 8), _measured([8] * 8)], "sage": [_measured([6] * 8), _measured([10] * 8)]}
    summary = demo._summary(_measured([2] * 8), runs, 1, 2)
    low, high = summary["grpo"]["pass@1_interval"]
    assert (
        summary["grpo"]["pass@1"] == pytest.approx(0.375) and high - low > 1
    )  # two seeds: t with one degree of freedom
    words = demo.in_words(_measured([2] * 8), runs, summary)
    assert "+0.125 [+0.125, +0.125]" in words and "One seed" not in words


def test_the_figure_has_labels_and_a_legend_on_every_panel():
    figure = demo.figure(_measured([2] * 8), {m: [_measured([4] * 8)] for m in demo.METHODS})
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_legend() is not None


def test_small_policy_is_an_ordinary_policy_for_the_commands(tmp_path, data, capsys):
    small_policy().save(tmp_path / "model")
    assert (
        main(
            [
                "evaluate",
                "--model",
                str(tmp_path / "model"),
                "--data",
                data,
                "--rows",
                "4",
                "--samples",
                "2",
                "--k",
                "1",
            ]
        )
        == 0
    )
    assert "pass@1" in capsys.readouterr().out
