from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from small_models import four_bit_policy, small_policy

from sage_lite import demo, memory
from sage_lite.cli import _parser, main
from sage_lite.data import data_path
from sage_lite.errors import UserError
from sage_lite.evaluation import Evaluation
from sage_lite.loading import load_config
from sage_lite.runlog import MetricsFile, read_lines
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
    assert printed.splitlines()[-1] == f"evaluate: sage-lite evaluate --model {out}"
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
        (["evaluate", "--model", "."], "the folder . holds no model"),
        (["evaluate", "--device", "foo"], "unknown device 'foo'"),
        (["chat", "--device", "cuda:99"], "device 'cuda:99' asked for"),
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
    assert all("--" + f.name.replace("_", "-") in shown for f in dataclasses.fields(TrainConfig))


@pytest.mark.parametrize("command", ["demo", "train", "evaluate", "chat", "export"])
def test_help_explains_every_option(command):
    """Each has a text of its own besides its default; those of the settings come from TrainConfig."""
    commands = next(a for a in _parser()._actions if a.dest == "command").choices
    for action in commands[command]._actions:
        text = re.sub(r"\(default: .*\)$", "", action.help or "").strip()
        assert len(text) > 5, f"{command} {action.option_strings}: {action.help!r}"


def test_help_shows_values_defaults_and_presets(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("dr_grpo", "reasoning_gym:NAME", "cosine", "colab-t4", "(default: 300)", "(default: {})"):
        assert text in shown


@pytest.mark.parametrize("options, message", [
    (["--task-options", "[1]"], "must be a JSON object"), (["--task-options", "{"], "must be a JSON object"),
    (["--samples", "0"], "whole number >= 1, got '0'"), (["--samples", "x"], "whole number >= 1, got 'x'"),
])  # fmt: skip
def test_values_of_the_wrong_kind_are_explained(options, message, capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", *options])
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_every_command_with_one_line(monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    for command, place in [("chat", "problems.load"), ("evaluate", "policy.load_policy"), ("train", "trainer.train")]:
        with monkeypatch.context() as patched:
            patched.setattr(f"sage_lite.{place}", stopped)
            assert main([command]) == 130
        assert capsys.readouterr().err == "sage-lite: interrupted\n"
    monkeypatch.setattr("sage_lite.options.add_config_options", stopped)  # while the parser is built
    assert main(["doctor"]) == 130


@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise there")
@pytest.mark.parametrize("arguments, codes", [("train --presets", (141,)), ("export --help", (0, 141))])
def test_a_reader_that_has_gone_leaves_no_traceback(arguments, codes):
    """argparse itself passes over what it cannot print, unless that is noticed at the end only."""
    command = [sys.executable, "-m", "sage_lite.cli", *arguments.split()]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode in codes and done.stderr == ""


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


SMALL = {"pool_size": 64, "test_rows": 8, "budget_rows": 4, "progress": False}


def test_a_stopped_demo_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second run's second step; the same command again gives what one without a stop gives."""
    write = MetricsFile.write

    def stop(self, line):
        if line["method"] == "sage" and line["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return write(self, line)

    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "write", stop)
        with pytest.raises(KeyboardInterrupt, match="stopped after 2 of 3 steps of sage, seed 0; the same command"):
            demo.run_demo(tmp_path / "demo", steps=3, **SMALL)
    assert not (tmp_path / "demo" / "summary.json").exists()
    capsys.readouterr()
    with pytest.raises(UserError, match="grpo-seed0 holds a run of an interrupted demo with steps=3, not 4"):
        demo.run_demo(tmp_path / "demo", steps=4, **SMALL)
    assert "measuring" not in capsys.readouterr().out  # known before anything is measured
    with pytest.warns(UserWarning, match="nothing is left"):
        demo.run_demo(tmp_path / "demo", steps=3, **SMALL)
    demo.run_demo(tmp_path / "whole", steps=3, **SMALL)
    found = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("demo", "whole")]
    for summary in found:
        for row in ("start", "grpo", "sage"):
            assert summary[row].pop("seconds") > 0
    assert found[0] == found[1]
    for method in demo.METHODS:
        assert len(read_lines(tmp_path / "demo" / f"{method}-seed0" / "metrics.jsonl")) == 3


def test_the_options_of_the_demo_reach_it(monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "run_demo", lambda out, **settings: asked.append(settings))
    for options in ([], ["--short"], ["--short", "--steps", "5"], ["--steps", "7", "--seeds", "2"]):
        assert main(["demo", *options]) == 0
    assert [(a["steps"], a["seeds"], "pool_size" in a) for a in asked] == [
        (300, 1, False), (3, 1, True), (5, 1, True), (7, 2, False)]  # fmt: skip


def test_a_demo_on_one_problem_writes_null_where_there_is_no_interval(tmp_path, capsys):
    demo.run_demo(tmp_path / "demo", steps=1, **SMALL | {"test_rows": 1, "budget_rows": 1})
    text = (tmp_path / "demo" / "summary.json").read_text()
    assert "NaN" not in text and json.loads(text)["start"]["pass@1_interval"] == [None, None]
    assert "[nan, nan]" in capsys.readouterr().out


def test_both_methods_of_the_demo_see_the_same_first_rollouts(tmp_path):
    demo.run_demo(tmp_path / "demo", steps=1, pool_size=64, test_rows=8, budget_rows=4, progress=False)
    first = [read_lines(tmp_path / "demo" / f"{m}-seed0" / "metrics.jsonl")[0] for m in demo.METHODS]
    for key in ("reward", "pass_rate", "dead_groups", "length", "cut_off"):
        assert first[0][key] == first[1][key]
    assert first[0]["grad_norm"] != first[1]["grad_norm"]


def test_evaluate_leaves_out_what_could_not_be_graded_and_prints_json(data, capsys, monkeypatch):
    found = Evaluation(np.array([2, 1, 0]), np.array([2, 2, 0]), np.array([1.0, 0.0, np.nan]), [])
    command = ["evaluate", "--data", data, "--rows", "3", "--samples", "2", "--k", "1"]
    monkeypatch.setattr("sage_lite.evaluation.evaluate", lambda *arguments, **options: found)
    assert main(command) == 0 and "greedy   0.500" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["greedy"] == 0.5
    found = Evaluation(np.array([1]), np.array([2]), np.array([1.0]), [])
    assert main([*command, "--json"]) == 0  # one problem: no interval, and JSON has no NaN
    printed = capsys.readouterr().out
    assert "NaN" not in printed and json.loads(printed)["pass@1"] == {"value": 0.5, "interval": [None, None]}


def test_evaluate_asks_a_run_what_it_held_out_and_says_so(lora_run, tmp_path, capsys):
    common = ["--samples", "2", "--max-new-tokens", "4"]
    file = str(lora_run / "gsm8k.jsonl")
    for options, count, which in [
        (["--model", str(lora_run / "run")], 2, "held out"),  # a fifth of 12
        (["--model", str(lora_run / "run"), "--task", "gsm8k", "--data", file], 2, "held out"),
        (["--model", str(lora_run / "run"), "--all-rows"], 12, "all rows"),
        (["--task", "gsm8k", "--data", file], 12, "all rows"),
    ]:
        assert main(["evaluate", *options, *common, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["problems"] == count and which in found["which"] and found["source"] == file
        assert {"pass@1", "pass@2"} <= set(found)  # 1 and --samples, where no k is given
    assert main(["evaluate", "--model", str(lora_run / "run"), *common, "--rows", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"problems: {file}; held out when" in printed and "the first of 2" in printed


def test_a_stand_in_is_named_as_one(capsys):
    common = ["--task", "gsm8k", "--samples", "1", "--max-new-tokens", "2", "--task-options", '{"size": 10}']
    for command in (["evaluate", "--rows", "1"], ["chat", "--prompt", "0"]):
        assert main([*command, *common]) == 0
        assert "offline stand-in for gsm8k" in capsys.readouterr().out
    config = load_config(data_path("tiny_qwen2"))
    planned = memory.plan(TrainConfig(), config, "gsm8k", 9, 9, 1, source="offline stand-in")
    assert planned.splitlines()[1] == "  problems: offline stand-in"


def test_graded_rewards_are_shown_as_such(data, capsys, monkeypatch):
    command = ["evaluate", "--data", data, "--samples", "2"]
    shown = {}
    for scores in ([[0.2, 0.4], [0.6, np.nan]], [[1.0, 0.0], [0.0, np.nan]]):
        table = np.array(scores)
        found = Evaluation((table >= 1).sum(-1), (~np.isnan(table)).sum(-1), np.zeros(2), [], table, table[:, 0])
        monkeypatch.setattr("sage_lite.evaluation.evaluate", lambda *arguments, found=found, **options: found)
        assert main(command) == main([*command, "--json"]) == 0
        text, _, line = capsys.readouterr().out.strip().rpartition("\n")
        shown[found.graded] = text, json.loads(line)
    text, numbers = shown[True]
    assert [numbers["reward"]["value"], *numbers["reward"]["interval"]] == pytest.approx([0.45, 0.3, 0.6])
    assert numbers["greedy_reward"]["value"] == pytest.approx(0.4)
    assert "reward   0.450 [0.300, 0.600]" in text and "greedy reward 0.400 [0.200, 0.600]" in text
    text, numbers = shown[False]
    assert "reward" not in text and "reward" not in numbers and "greedy_reward" not in numbers


@pytest.mark.parametrize("method, pass_rate, dead, discouraged", [
    ("grpo", 0.0, 1.0, True), ("grpo", 0.0, 0.5, False), ("grpo", 0.5, 1.0, False), ("sign", 0.0, 1.0, False),
])  # fmt: skip
def test_only_a_step_that_taught_nothing_is_called_so(
    method, pass_rate, dead, discouraged, tmp_path, capsys, monkeypatch
):
    line = {"step": 1, "reward": 0.3, "pass_rate": pass_rate, "dead_groups": dead}
    result = types.SimpleNamespace(metrics=[line], out=tmp_path, stopped_early=False)
    monkeypatch.setattr("sage_lite.trainer.train", lambda config, say: result)
    assert main(["train", "--method", method, "--out", str(tmp_path / "a run"), "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr().out
    assert ("teach nothing" in printed) == discouraged
    assert shlex.split(printed.splitlines()[-1].removeprefix("evaluate: "))[-2:] == ["--max-new-tokens", "9"]


def test_the_demo_leaves_out_problems_that_could_not_be_graded():
    pool = Evaluation(np.array([16, 16, 4, 0]), np.array([16, 16, 16, 0]), None, [])
    measured = dataclasses.replace(_measured([2] * 8), pool=pool)
    assert demo._row([measured], "grpo")["share_p_hi"] == pytest.approx(2 / 3)
    histogram = demo.figure(measured, {m: [measured] for m in demo.METHODS}).axes[1]
    assert [patch.get_data().values.sum() for patch in histogram.patches] == pytest.approx([1.0] * 3)


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


GSM8K = [
    {"question": f"Tom has {n} apples and buys {n} more. How many has he?", "answer": f"{n}+{n}\n#### {2 * n}"}
    for n in range(1, 13)
]


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """A finished run of GSM8K rows with LoRA on 4-bit weights, from a local model folder."""
    four_bit_policy()
    folder = tmp_path_factory.mktemp("lora")
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    command = ["train", "--task", "gsm8k", "--data", str(folder / "gsm8k.jsonl"), "--out", str(folder / "run"),
               "--model", str(data_path("tiny_qwen2")), "--four-bit", "--lora", "8", "--steps", "2",
               "--batch-size", "2", "--group-size", "4", "--max-new-tokens", "8", "--no-progress"]  # fmt: skip
    assert main(command) == 0
    return folder


def test_four_bit_lora_on_gsm8k_rows_is_planned_and_trains(lora_run, capsys):
    config = json.loads((lora_run / "run" / "config.json").read_text())
    assert config["four_bit"] and config["lora"] == 8 and len(read_lines(lora_run / "run" / "metrics.jsonl")) == 2
    command = ["train", "--task", "gsm8k", "--data", str(lora_run / "gsm8k.jsonl"), "--four-bit", "--lora", "8"]
    assert main([*command, "--plan", "--out", str(lora_run / "planned")]) == 0
    printed = capsys.readouterr().out
    assert "LoRA of rank 8 on 4-bit weights" in printed and "memory, predicted" in printed
    assert "64 prompts x 8 = 512 a step" in printed and not (lora_run / "planned").exists()


def test_a_preset_is_overridden_by_what_is_given(lora_run, capsys):
    mine = ["--model", str(data_path("tiny_qwen2")), "--data", str(lora_run / "gsm8k.jsonl"), "--batch-size", "2"]
    assert main(["train", "--preset", "colab-t4", "--plan", *mine]) == 0
    printed = capsys.readouterr().out
    assert "2 prompts x 8 = 16 a step, at most 4,096 tokens" in printed and "rank 16 on 4-bit" in printed
    assert main(["train", "--preset", "paper-gsm8k", "--plan", *mine, "--no-share-prompts", "--tau", "0.2"]) == 0
    assert "all weights" in capsys.readouterr().out
    assert main(["train", "--preset", "paper-maths"]) == 2 and "paper-gsm8k" in capsys.readouterr().err
    assert main(["train", "--presets"]) == 0 and "colab-t4" in capsys.readouterr().out


def test_evaluate_an_adapter_or_a_run(lora_run, capsys):
    run = str(lora_run / "run")
    step = str(lora_run / "run" / "checkpoints" / "step-000002")
    common = ["--task", "gsm8k", "--data", str(lora_run / "gsm8k.jsonl"), "--rows", "2", "--samples", "2", "--k", "1",
              "--max-new-tokens", "4", "--json"]  # fmt: skip
    found = []
    for model in (["--model", run], ["--adapter", step], ["--model", str(data_path("tiny_qwen2")), "--adapter", run]):
        assert main(["evaluate", *model, *common]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] == found[2]


def test_chat_asks_once_or_reads_lines(lora_run, data, capsys, monkeypatch):
    common = ["--samples", "2", "--max-new-tokens", "4"]
    assert main(["chat", "--adapter", str(lora_run / "run"), "--task", "gsm8k", "--prompt", "2+2? => 4", *common]) == 0
    printed = capsys.readouterr().out
    assert "prompt: 2+2?" in printed and "of 2" in printed and "not graded" not in printed
    monkeypatch.setattr("sys.stdin", io.StringIO("3 5 7 = 22\n0\n9999\n\n"))
    assert main(["chat", "--data", data, *common]) == 0
    printed = capsys.readouterr().out
    assert "prompt: 3 5 7 = 22" in printed and "93" in printed and "not 9999" in printed
    assert main(["chat", "--adapter", "./nowhere", "--prompt", "x"]) == 2


def test_export_an_adapter_a_merged_model_and_all_weights(lora_run, tmp_path, capsys):
    run = str(lora_run / "run")
    assert main(["export", "--run", run, "--out", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert main(["export", "--adapter", str(tmp_path / "adapter"), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    printed = capsys.readouterr().out
    assert "merged into the 4-bit weights it was trained on" in printed and "original weights" in printed
    again = ["evaluate", "--model", str(tmp_path / "merged"), "--rows", "2", "--samples", "2", "--k", "1"]
    assert main(again) == 0
    assert main(["export", "--run", run, "--out", str(tmp_path / "merged"), "--merge"]) == 2
    assert "is there already" in capsys.readouterr().err
    small_policy().save(tmp_path / "model")
    assert main(["export", "--adapter", str(tmp_path / "model"), "--out", str(tmp_path / "half")]) == 0
    assert main(["export", "--adapter", str(tmp_path / "model"), "--out", str(tmp_path / "no"), "--merge"]) == 2
