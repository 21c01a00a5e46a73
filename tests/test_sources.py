from __future__ import annotations

import json

import pytest

from sage_lite import sources
from sage_lite.errors import UserError

COLUMNS = [{"question": "q", "answer": "a"}, {"question": "problem", "answer": "a"}]


def keep(row: dict) -> dict:
    if row["answer"] == "bad":
        raise ValueError("the answer is bad")
    return row


def read(data, config=None):
    return sources.read(data, config, COLUMNS, keep)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


ROWS = [{"q": "one", "a": "1", "other": [1]}, {"q": "zwei ü", "a": "2", "other": []}]
CONVERTED = [{"question": "one", "answer": "1"}, {"question": "zwei ü", "answer": "2"}]


def test_jsonl_json_parquet_and_lists_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    write(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / "lines.json", ROWS)
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    (tmp_path / "blank.jsonl").write_text("\ufeff\n" + "\r\n\n".join(map(json.dumps, ROWS)) + "\n\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for file in ("rows.jsonl", "lines.json", "array.json", "blank.jsonl", "rows.parquet"):
        assert read(tmp_path / file) == read(str(tmp_path / file)) == {"all": CONVERTED}, file
    assert read(ROWS) == {"all": CONVERTED}


def test_the_second_naming_of_the_columns():
    assert read([{"problem": "one", "a": "1"}]) == {"all": CONVERTED[:1]}


def test_a_folder_has_an_official_split(tmp_path):
    write(tmp_path / "train_1000.jsonl", ROWS)
    assert read(tmp_path) == {"all": CONVERTED}  # nothing held out yet
    write(tmp_path / "test.jsonl", ROWS[:1])
    (tmp_path / "notes.txt").write_text("not data")
    assert read(tmp_path) == {"train": CONVERTED, "test": CONVERTED[:1]}
    write(tmp_path / "train_2.jsonl", ROWS)
    with pytest.raises(UserError, match="several train files: name one of train_1000.jsonl, train_2.jsonl"):
        read(tmp_path)


def test_a_folder_without_data(tmp_path):
    with pytest.raises(UserError, match="holds no file named train"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"q": "one", "a": "1"}\nnot json\n', r":2: not JSON"),
        ('{"q": "one", "a": "1"}\n\n{"q": "two"}\n', r":3: lacks a"),
        ('{"q": "one", "a": "1"}\n[1, 2]\n', r":2: expected an object"),
        ("[1, 2]\n", r":1: expected an object"),
        ('{"q": "one", "a": "bad"}\n', r":1: the answer is bad"),
        ('{"question": "one", "gold": "1"}\n', "has the columns question, gold; this task needs q, a or problem, a"),
        ("[" * 100_000, r":1: not JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert "rows.jsonl" in str(caught.value)


def test_unreadable_files(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"q": "ü"}'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        read(tmp_path / "latin.jsonl")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(tmp_path / "broken.parquet")
    (tmp_path / "rows.csv").write_text("q,a\n")
    with pytest.raises(UserError, match="ending must be .jsonl, .json, .parquet"):
        read(tmp_path / "rows.csv")


def test_parquet_with_other_columns_or_no_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), path)
    with pytest.raises(UserError, match="has the columns text; this task needs q, a"):
        read(path)
    pyarrow.parquet.write_table(
        pyarrow.table({"q": pyarrow.array([], "string"), "a": pyarrow.array([], "string")}), path
    )
    with pytest.raises(UserError, match="is empty"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"q": ["x", "y"], "a": ["1", "bad"]}), path)
    with pytest.raises(UserError, match="rows.parquet, row 1: the answer is bad"):
        read(path)


def test_lists():
    with pytest.raises(UserError, match="the list is empty"):
        read([])
    with pytest.raises(UserError, match="row 1 of the list: lacks a"):
        read([ROWS[0], {"q": "x"}])
    with pytest.raises(UserError, match="row 0 of the list: expected an object"):
        read(["x"])


@pytest.mark.parametrize("data", ["missing.jsonl", "folder/missing.parquet", "owner/name.json", "../x.jsonl"])
def test_a_missing_file_is_not_taken_for_a_hub_id(data, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="does not exist"):
        read(data)


@pytest.mark.parametrize("data", ["gsm8k", "a/b/c", "./name", "/tmp-nowhere", "~/name", "owner/"])
def test_neither_file_nor_hub_id(data, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="neither a file or folder here nor a hub id"):
        read(data)


def hub(monkeypatch, **parts):
    import datasets

    asked = []
    tables = datasets.DatasetDict({part: datasets.Dataset.from_list(rows) for part, rows in parts.items()})

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return tables

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_hub(monkeypatch):
    asked = hub(monkeypatch, train=ROWS, test=ROWS[:1], extra=ROWS)
    assert read("owner/name", "main") == {"train": CONVERTED, "test": CONVERTED[:1]}
    assert asked == [(("owner/name", "main"), {})]  # and no code from the hub is trusted
    assert read("owner/name") == {"train": CONVERTED, "test": CONVERTED[:1]}
    assert asked[1:] == [(("owner/name",), {})]


def test_the_hub_without_a_test_split(monkeypatch):
    hub(monkeypatch, train=ROWS)
    assert read("owner/name") == {"all": CONVERTED}
    hub(monkeypatch, test=ROWS)
    assert read("owner/name") == {"test": CONVERTED}
    hub(monkeypatch, train=ROWS, validation=ROWS[1:])
    assert read("owner/name") == {"train": CONVERTED, "test": CONVERTED[1:]}


def test_the_hub_with_other_columns(monkeypatch):
    hub(monkeypatch, train=[{"text": "x"}])
    with pytest.raises(UserError, match=r"owner/name \(train\) has the columns text; this task needs q, a"):
        read("owner/name")
    hub(monkeypatch, train=[*ROWS, {"q": "x", "a": "bad", "other": []}])
    with pytest.raises(UserError, match=r"owner/name \(train\), row 2: the answer is bad"):
        read("owner/name")


def test_the_hub_out_of_reach(monkeypatch):
    def load_dataset(*arguments):
        raise ConnectionError("no route to the hub\nand a long story")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError, match="could not load 'owner/name' from the hub: no route to the hub .*a local file"):
        read("owner/name")


def rows_of(keys):
    return [{"key": key, "n": n} for n, key in enumerate(keys)]


def test_hold_out_by_distinct_key():
    rows = rows_of([i % 50 for i in range(120)])
    train, test = sources.hold_out(rows, lambda row: row["key"], 10, seed=0)
    assert len({row["key"] for row in test}) == len(test) == 10
    assert not {row["key"] for row in test} & {row["key"] for row in train}
    assert {row["key"] for row in test} | {row["key"] for row in train} == set(range(50))
    assert len(train) == sum(row["key"] not in {row["key"] for row in test} for row in rows)


def test_hold_out_depends_on_the_seed_and_not_on_the_order():
    rows = rows_of(range(100))

    def test_keys(rows, seed):
        return [row["key"] for row in sources.hold_out(rows, lambda row: row["key"], 20, seed)[1]]

    assert test_keys(rows, 0) == test_keys(rows[::-1], 0) != test_keys(rows, 1)
    # Pinned: the same on every machine, in every process, under every Python.
    assert test_keys(rows, 0)[:5] == [24, 69, 38, 33, 53]


def test_hold_out_sizes():
    rows = rows_of(range(10))
    sizes = [len(sources.hold_out(rows[:n], lambda row: row["key"], None, 0)[1]) for n in (2, 5, 10)]
    assert sizes == [1, 1, 2]
    assert len(sources.hold_out(rows_of(range(5000)), lambda row: row["key"], None, 0)[1]) == 400
    assert sources.hold_out(rows, lambda row: row["key"], 0, 0)[1] == []
    for bad in (10, 11, -1):
        with pytest.raises(UserError, match=f"cannot hold out {bad} of 10"):
            sources.hold_out(rows, lambda row: row["key"], bad, 0)
