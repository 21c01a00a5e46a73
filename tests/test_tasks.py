from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from sage_lite import countdown, problems
from sage_lite.errors import UserError
from sage_lite.tasks import STYLES, hub_of, load_task, task_names


def problem(row: dict) -> tuple:
    return tuple(sorted(row["nums"])), row["target"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- Countdown


def test_generated_countdown():
    task = load_task("countdown")
    assert (len(task.train), len(task.test)) == (1744, 400)
    assert Counter(map(problem, task.train + task.test)) == Counter(
        countdown.problems()
    )  # each once, none on both sides
    orders = Counter(
        tuple(sorted(range(3), key=row["nums"].__getitem__)) for row in task.train if len(set(row["nums"])) == 3
    )
    assert len(orders) == 6 and min(orders.values()) > 100  # the numbers stand in any order
    for row in task.test:
        assert task.score(task.reference(row), row) == 1.0
        assert task.score("1+1", row) == 0.0


def test_the_test_problems_never_change():
    """Everything measured on the embedded task refers to these 400: pinned across processes and hash seeds."""
    task = load_task("countdown")
    assert task.test[:3] == [
        {"nums": [1, 6, 3], "target": 4},
        {"nums": [9, 5, 9], "target": 13},
        {"nums": [9, 4, 5], "target": 31},
    ]
    code = "from sage_lite.tasks import load_task; task = load_task('countdown'); print(task.test, task.train)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout == f"{task.test} {task.train}\n", done.stderr


def test_a_pool_is_a_fixed_part_of_the_training_problems():
    task, pool = load_task("countdown"), load_task("countdown", pool_size=1024)
    assert pool.train == task.train[:1024] and pool.test == task.test
    other = load_task("countdown", seed=1)
    assert other.test != task.test and len(other.test) == 400


def test_countdown_prompts():
    task, row = load_task("countdown"), {"nums": [3, 5, 7], "target": 22}
    assert task.styles == STYLES == ("instruct", "short")
    assert task.prompt(row, "short") == "3 5 7 = 22"
    text = task.prompt(row, "instruct")
    assert "3, 5, 7" in text and "equals 22" in text and "exactly once" in text and "</answer>" in text
    assert task.prompt(row) == text
    with pytest.raises(UserError, match="no prompt style 'long'; it has instruct, short"):
        task.prompt(row, "long")
    with pytest.raises(UserError, match="no prompt style"):
        task.default_max_new_tokens("long")


def test_countdown_lengths_hold_every_solution():
    task = load_task("countdown", data=[{"nums": [100, 99, 98, 97], "target": n} for n in range(30)])
    longest = max(len(text) for n in range(30) for text in countdown.solutions([100, 99, 98, 97], n))
    assert longest < task.default_max_new_tokens("short") <= longest + 10
    assert task.default_max_new_tokens("instruct") == 256


def test_countdown_from_a_file_in_the_hubs_schema(tmp_path):
    rows = [{"target": t, "nums": [n, 2, 3]} for n in range(10, 20) for t in range(10)]
    repeated = [{"target": 0, "nums": [2, 3, 10]}, *rows]  # the same problem as the first, in another order
    task = load_task("countdown", write(tmp_path / "rows.jsonl", repeated))
    train, test = set(map(problem, task.train)), set(map(problem, task.test))
    assert len(task.test) == len(test) == 20 and len(train) == 80 and not train & test
    assert str(tmp_path) in task.source
    everything = load_task("countdown", str(tmp_path / "rows.jsonl"), split="test")
    assert (len(everything.train), len(everything.test)) == (0, 101)
    assert len(load_task("countdown", rows, split="test", test_size=7).test) == 7
    assert len(load_task("countdown", rows, split="train").train) == 100
    assert len(load_task("countdown", rows, test_size=30).test) == 30


def test_countdown_from_the_hub(monkeypatch):
    import datasets

    rows = [{"target": n + 5, "nums": [n, 2, 3]} for n in range(20)]
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for data in ("hub", "Jiayi-Pan/Countdown-Tasks-3to4"):
        task = load_task("countdown", data)
        assert sorted(row["target"] for row in task.train + task.test) == list(range(5, 25))
    assert asked == [("Jiayi-Pan/Countdown-Tasks-3to4",)] * 2
    row = task.train[0]
    assert task.score("+".join(map(str, row["nums"])), row) == 1.0


@pytest.mark.parametrize(
    "row, message",
    [
        ({"nums": [1, 2.0], "target": 3}, "nums must be"),
        ({"nums": "1 2", "target": 3}, "nums must be"),
        ({"nums": [], "target": 3}, "nums must be"),
        ({"nums": [1, True], "target": 3}, "nums must be"),
        ({"nums": [1, -2], "target": 3}, "nums must be"),
        ({"nums": [1, 10**12], "target": 3}, "nums must be"),
        ({"nums": [1, 2], "target": "3"}, "target must be a whole number, not '3'"),
        ({"nums": [1, 2], "target": 3.0}, "target must be a whole number, not 3.0"),
        ({"nums": [1, 2], "target": None}, "target must be a whole number, not None"),
        ({"nums": [1, 2]}, "lacks target"),
    ],
)
def test_a_bad_countdown_row_is_named(tmp_path, row, message):
    path = write(tmp_path / "rows.jsonl", [{"nums": [1, 2], "target": 3}, row])
    with pytest.raises(UserError, match=f"rows.jsonl:2: {message}"):
        load_task("countdown", path)


def test_unsolvable_or_long_problems_have_no_reference():
    task = load_task("countdown", [{"nums": [1, 1], "target": 50}, {"nums": [1] * 9, "target": 9}])
    assert [task.reference(row) for row in task.train + task.test] == [None, None]


def test_the_real_countdown_file(repository):
    path = repository.parent / "shared" / "data" / "countdown" / "cd3_test_256.jsonl"
    if not path.exists():
        pytest.skip("needs the real Countdown rows")
    task = load_task("countdown", path)
    assert len(task.train) + len(task.test) == 256
    assert all(task.score(task.reference(row), row) == 1.0 for row in task.train + task.test)


# ---- Mathematics

GSM8K = [
    {"question": f"What is {n} plus 1?", "answer": f"{n}+1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
    for n in range(1500, 1510)
]
DEEPMATH = [
    {
        "question": f"Is {n} even?",
        "final_answer": ["Yes", "No"][n % 2],
        "difficulty": 5.0,
        "r1_solution_1": f"<think>Hm.</think>{n}.",
    }
    for n in range(10)
]
TRL = [{"prompt": [{"role": "user", "content": f"Is {n} even?"}], "solution": ["Yes", "No"][n % 2]} for n in range(10)]
MATH500 = [
    {"problem": f"Halve {n}.", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$.", "answer": rf"\frac{{{n}}}{{2}}"}
    for n in range(10)
]


def test_gsm8k(tmp_path):
    task = load_task("gsm8k", write(tmp_path / "rows.jsonl", GSM8K))
    assert (len(task.train), len(task.test)) == (8, 2)
    row = next(row for row in task.train + task.test if "1500" in row["question"])
    assert row == {"question": "What is 1500 plus 1?", "answer": "1501", "solution": "1500+1 = 1501\n#### 1501"}
    assert task.reference(row) == row["solution"] and task.score(task.reference(row), row) == 1.0
    assert task.score("The answer is 1,501.", row) == 1.0 and task.score("1500", row) == 0.0
    assert task.prompt(row, "short") == row["question"]
    assert task.prompt(row).startswith(row["question"]) and r"\boxed{}" in task.prompt(row)
    assert task.default_max_new_tokens() == 256


def test_gsm8k_without_a_final_answer_is_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*GSM8K, {"question": "x", "answer": "no mark"}])
    with pytest.raises(UserError, match="rows.jsonl:11: a GSM8K answer ends in '#### number'"):
        load_task("gsm8k", path)
    with pytest.raises(UserError, match="row 0 of the list: the answer must be a text, not 5"):
        load_task("gsm8k", [{"question": "x", "answer": 5}])
    with pytest.raises(UserError, match="the question must be a text that is not empty"):
        load_task("gsm8k", [{"question": " ", "answer": "#### 5"}])


def test_wrong_columns_are_told():
    with pytest.raises(UserError, match="has the columns nums, target; this task needs question, answer"):
        load_task("gsm8k", [{"nums": [1], "target": 1}])
    with pytest.raises(UserError, match="needs question, final_answer, r1_solution_1 or prompt, solution"):
        load_task("deepmath", GSM8K)


def test_deepmath_in_both_versions():
    for rows in (DEEPMATH, TRL):
        task = load_task("deepmath", rows)
        row = next(row for row in task.train + task.test if "3" in row["question"])
        assert (row["question"], row["answer"]) == ("Is 3 even?", "No")
        assert task.score(r"\boxed{No}", row) == 1.0 and task.score(r"\boxed{Yes}", row) == 0.0
        assert task.default_max_new_tokens() == 1024
        assert task.reference(row) == ("3." if rows is DEEPMATH else None)


def test_math500_is_a_test_set():
    task = load_task("math500", MATH500)
    assert (len(task.train), len(task.test)) == (0, 10)
    assert all(task.score(task.reference(row), row) == 1.0 for row in task.test)
    assert len(load_task("math500", MATH500, split="train").train) == 10


def test_official_splits_are_kept(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(GSM8K[:7]), "test": datasets.Dataset.from_list(GSM8K[7:])}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task("gsm8k", "hub")
    assert asked == [("openai/gsm8k", "main")]
    assert [row["answer"] for row in task.train] == [str(n) for n in range(1501, 1508)]
    assert [row["answer"] for row in task.test] == ["1508", "1509", "1510"]
    assert len(load_task("gsm8k", "openai/gsm8k", test_size=2).test) == 2
    only_test = load_task("gsm8k", "openai/gsm8k", split="test")
    assert (len(only_test.train), len(only_test.test)) == (0, 3)


def test_the_hub_ids(monkeypatch):
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name in ("deepmath", "math500"):
        with pytest.raises(UserError, match="no network"):
            load_task(name, "hub")
    with pytest.raises(UserError, match="no network"):
        load_task("deepmath", "trl-lib/DeepMath-103K")
    assert asked == [("zwhe99/DeepMath-103K",), ("HuggingFaceH4/MATH-500",), ("trl-lib/DeepMath-103K",)]


def test_similarity_rewards_compare_with_the_solution():
    row = {"question": "What is 1500 plus 1?", "answer": "1501", "solution": "1500+1 = 1501\n#### 1501"}
    near = load_task("gsm8k", GSM8K, reward="similarity")
    assert near.score(row["solution"], row) == 1.0 and 0 < near.score("it is 1501", row) < 1
    formatted = load_task("gsm8k", GSM8K, reward="format_similarity")
    completion = f"<think>easy</think><answer>{row['solution']}</answer>"
    assert formatted.score(completion, row) == pytest.approx(1.0)
    assert formatted.score(row["solution"], row) == pytest.approx(0.65)
    assert "<think>" in formatted.prompt(row) and "<answer>" in formatted.prompt(row)
    opened = load_task("gsm8k", GSM8K, reward="format_similarity", template_opened_think=True)
    assert opened.score(completion.removeprefix("<think>"), row) == pytest.approx(1.0)


def test_rewards_that_cannot_be():
    with pytest.raises(UserError, match="needs worked solutions, but rows of a list of rows have none"):
        load_task("deepmath", TRL, reward="similarity")
    with pytest.raises(UserError, match="its only reward is 'exact'"):
        load_task("countdown", reward="similarity")
    with pytest.raises(UserError, match="unknown reward 'bleu'; there are exact, similarity, format_similarity"):
        load_task("gsm8k", GSM8K, reward="bleu")


@pytest.mark.parametrize("name", ["gsm8k", "deepmath", "math500"])
def test_offline_stand_in(name):
    pytest.importorskip("reasoning_gym")
    task = load_task(name, size=60, test_size=10)
    assert "stand-in" in task.source and len(task.test) == 10 and len(task.train) >= 45
    assert not {row["question"] for row in task.train} & {row["question"] for row in task.test}
    assert all(task.score(rf"So it is \boxed{{{row['answer']}}}.", row) == 1.0 for row in task.test)
    assert all(task.reference(row) for row in task.test)
    assert load_task(name, size=60, test_size=10).test == task.test


def test_the_real_gsm8k_folder(repository):
    folder = repository.parent / "shared" / "data" / "gsm8k"
    if not folder.exists():
        pytest.skip("needs the real GSM8K rows")
    task = load_task("gsm8k", folder, reward="similarity")
    assert (len(task.train), len(task.test)) == (1000, 1319)
    assert all(task.score(row["solution"], row) == 1.0 for row in task.test[:50])


# ---- Names and options


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"name": "countdwn"},
            "unknown task 'countdwn'; there are countdown, .* and reasoning_gym:NAME",
        ),
        ({"name": "gym:lcm"}, "unknown task 'gym:lcm'"),
        ({"name": "countdown", "pool": 5}, "task 'countdown' has no option pool"),
        ({"name": "countdown", "split": "dev"}, "split must be"),
        ({"name": "countdown", "pool_size": 0}, "pool_size must be at least 1, not 0"),
        ({"name": "countdown", "test_size": -1}, "test_size must be at least 0, not -1"),
        ({"name": "countdown", "test_size": 2144}, "cannot hold out 2144 of 2144 distinct problems"),
        ({"name": "reasoning_gym:lcm", "data": "x.jsonl"}, "takes neither data nor split"),
    ],
)
def test_mistakes_are_told(arguments, message):
    with pytest.raises(UserError, match=message):
        load_task(**arguments)


def test_a_split_that_is_not_there(tmp_path):
    write(tmp_path / "test.jsonl", GSM8K)
    with pytest.raises(UserError, match="no problems are left with split='train'"):
        load_task("gsm8k", tmp_path, split="train")


def test_names():
    assert task_names() == ["countdown", "gsm8k", "deepmath", "math500"]


def test_loading_the_embedded_task_imports_nothing_heavy():
    code = (
        "import sys; from sage_lite.tasks import load_task; load_task('countdown');"
        "heavy = {'torch', 'datasets', 'reasoning_gym', 'math_verify', 'sympy', 'pyarrow'};"
        "print(heavy & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


# ---- the problems that a trained model is asked


@pytest.fixture
def run(tmp_path):
    """The folder of a run on mine.jsonl, as far as its settings go; the options of its task may be changed."""
    rows = [{"nums": [30 + i, 5, 93], "target": 128 + i} for i in range(24)]
    data = write(tmp_path / "mine.jsonl", rows)

    def make(**options):
        (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
        settings = {"task": "countdown", "data": str(data), "task_options": options, "seed": 3}
        (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
        return problems.run_of(tmp_path / "run")

    return make


def test_a_run_is_asked_what_its_training_held_out(run, tmp_path):
    trained = run(test_size=5, seed=2)
    wanted = load_task("countdown", tmp_path / "mine.jsonl", test_size=5, seed=2)
    for data in (None, str(tmp_path / "mine.jsonl"), str(tmp_path / "run" / ".." / "mine.jsonl")):
        task, which = problems.load(trained, data=data, part="test")
        assert task.test == wanted.test and task.train == wanted.train and which.startswith("held out")
    for folder in ("run/checkpoints/step-000001", "run"):
        assert problems.run_of(tmp_path / folder) == trained
    task, which = problems.load(trained, part="test", all_rows=True)
    assert len(task.test) == 24 and "all rows" in which and "trained on this data" in which
    task, which = problems.load(trained, part="train")
    assert task.train == wanted.train and "was trained on" in which
    task, which = problems.load(trained, options={"seed": 9}, part="test")
    assert len(task.test) == 5 and task.test != wanted.test and "not as when" in which


def test_data_that_a_run_does_not_know_is_taken_whole(run, tmp_path):
    other = write(tmp_path / "other.jsonl", [{"nums": [30 + i, 5, 93], "target": 128 + i} for i in range(12)])
    for model in (None, run(test_size=5)):
        task, which = problems.load(model, data=str(other), part="test")
        assert len(task.test) == 12 and not task.train and which.startswith("all rows")
        assert ("mine.jsonl" in which) == (model is not None)
    task, which = problems.load(run(), "gsm8k", part="test", options={"size": 20})
    assert task.name == "gsm8k" and task.train and which == "the test part"
    assert problems.run_of(None) is problems.run_of(tmp_path / "nowhere") is problems.run_of(tmp_path) is None


def test_a_file_that_was_moved_is_known_by_its_name(run, tmp_path):
    trained = run(test_size=5)
    (tmp_path / "place").mkdir()
    (tmp_path / "mine.jsonl").rename(tmp_path / "place" / "mine.jsonl")
    task, which = problems.load(trained, data=str(tmp_path / "place" / "mine.jsonl"), part="test")
    assert len(task.test) == 5 and which.startswith("held out")
    with pytest.raises(UserError, match="mine.jsonl does not exist"):
        problems.load(trained, part="test")


def test_a_run_that_held_nothing_out_says_so_and_a_damaged_one_too(run, tmp_path):
    with pytest.raises(UserError, match="none was held out.*--all-rows"):
        problems.load(run(split="train"), part="test")
    task, _ = problems.load(run(split="train"), part="test", all_rows=True)
    assert len(task.test) == 24
    assert len(problems.load(run(split="train"))[0].train) == 24  # to chat about problems of one's own
    with pytest.raises(UserError, match="task options .* do not fit"):
        problems.load(None, options={"test_size": "many"})
    (tmp_path / "run" / "config.json").write_text('{"task": "count')
    with pytest.raises(UserError, match="config.json is damaged"):
        problems.run_of(tmp_path / "run")


def test_the_hub_is_the_same_data_under_both_names(run):
    assert problems._same("gsm8k", "hub", "openai/gsm8k") and not problems._same("gsm8k", "openai/gsm8k", "other/data")
    assert problems._same("countdown", None, None) and not problems._same("countdown", "hub", None)
    assert hub_of("countdown").count("/") == hub_of("deepmath").count("/") == 1 and hub_of("reasoning_gym:gcd") is None
