"""The ledger of claims: complete, consistent with the notebooks, and the same in README."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sage_lite import claims
from sage_lite.errors import UserError

ROW = {"id": "x", "source": "S", "statement": "it holds", "status": "proved", "notebook": "01_a.ipynb",
       "tag": "claim-x"}

# What the ledger must have a row for: SAGE's theory and experiments, then the abstracts of Sign, F-GRPO and MDP-GRPO.
WANTED = {
    "weight-formula", "bounded-at-one", "tau-zero-maxrl", "tau-large-reinforce", "grpo-diverges", "log-mgf",
    "non-conservative", "tilting", "one-line", "bounded-range",
    "budget-easy", "budget-middle", "gsm8k", "countdown", "deepmath", "similarity-rewards", "poetry", "meetingbank",
    "alpacaeval", "mmlu", "gpqa", "three-billion", "imagenet-cross-entropy", "imagenet-reinforce", "tau-stable",
    "tau-best", "tau-too-large",
    "sign-degeneracy", "sign-degeneracy-rate", "sign-descent", "sign-gsm8k", "sign-transfer", "sign-compression",
    "tail-miss", "unsampled-mass", "f-grpo-grpo", "f-grpo-dapo", "f-grpo-cispo", "f-grpo-transfer",
    "mdp-low-variance", "mdp-centering", "mdp-zero-variance", "mdp-remedies", "mdp-strict", "mdp-small-groups",
}  # fmt: skip
PUBLISHED = {  # numbers that must be quoted rightly
    "budget-easy": "36.4 10.0", "budget-middle": "58.9 82.7", "gsm8k": "75.8 73.5", "countdown": "58.1 57.7",
    "deepmath": "51.8 50.9", "similarity-rewards": "7.0 3.3 1.2", "poetry": "68.0 54.6 35.0", "meetingbank": "70 62",
    "alpacaeval": "2.50", "mmlu": "65.2", "gpqa": "27.1", "three-billion": "2.1 9.5", "tau-stable": "0.5",
    "tau-best": "0.1 0.3", "tau-too-large": "1", "sign-degeneracy-rate": "0.69", "sign-gsm8k": "73.8 28.4",
    "f-grpo-grpo": "64.1 70.3", "f-grpo-dapo": "69.3 72.5", "f-grpo-cispo": "73.2 76.8", "mdp-strict": "5.0",
    "non-conservative": "1/15",
}  # fmt: skip


@pytest.fixture(scope="module")
def ledger() -> dict[str, claims.Claim]:
    return {claim.id: claim for claim in claims.load()}


# -- the ledger itself ---------------------------------------------------------------------------------------------


def test_every_claim_of_the_sources_has_a_row(ledger):
    assert not WANTED - set(ledger)
    assert {claim.source for id, claim in ledger.items() if id not in WANTED} <= {"Ours"}


@pytest.mark.parametrize("id", PUBLISHED)
def test_published_numbers_are_quoted(ledger, id):
    for number in PUBLISHED[id].split():
        assert number in ledger[id].claimed


def test_what_is_proved_or_measured_points_at_a_cell_that_ran(ledger):
    claims.check_cells(list(ledger.values()))
    assert all(claim.tag for claim in ledger.values() if claim.status in claims.SHOWN)


def test_readme_shows_the_ledger(ledger, repository: Path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert claims.put_table(readme, list(ledger.values())) == readme, (
        "run: python -m sage_lite.claims --write README.md")


def test_the_published_magnitudes_of_the_budget_are_not_called_confirmed(ledger):
    assert ledger["budget-easy"].status not in claims.SHOWN


# -- what a row may say --------------------------------------------------------------------------------------------


def write(folder: Path, *rows: dict) -> Path:
    file = folder / "claims.toml"
    lines = [line for row in rows for line in ("[[claim]]", *(f"{k} = {json.dumps(v)}" for k, v in row.items()))]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def changed(**changes) -> dict:
    return {key: value for key, value in {**ROW, **changes}.items() if value is not None}


def test_a_good_row_is_read(tmp_path):
    assert claims.load(write(tmp_path, ROW)) == [claims.Claim(**ROW)]


@pytest.mark.parametrize(("row", "message"), [
    (changed(status="Proved"), "claim 'x': unknown status 'Proved'; choose one of proved, measured"),
    (changed(id=None), "claim number 1: id is missing"),
    (changed(statement=""), "claim 'x': statement is missing"),
    (changed(proof="yes"), "claim 'x': unknown field 'proof'"),
    (changed(claimed=36.4), "claim 'x': claimed must be a text on one line, got 36.4"),
    (changed(note="two\nlines"), "claim 'x': note must be a text on one line"),
    (changed(tag=None), "claim 'x': notebook and tag belong together"),
    (changed(notebook=None, tag=None), "claim 'x': status 'proved' needs the notebook and the tag"),
    (changed(status="measured"), "claim 'x': status 'measured' needs the number seen"),
    (changed(status="direction only", seen="1"), "claim 'x': status 'direction only' needs a note"),
    (changed(status="contradicted", note="why"), "claim 'x': status 'contradicted' needs the number seen"),
    (changed(status="not tried"), "claim 'x': status 'not tried', yet it has a cell"),
    (changed(status="needs a GPU", notebook=None, tag=None, seen="70"), "claim 'x': status 'needs a GPU', yet it has"),
])
def test_a_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        claims.load(write(tmp_path, row))
    assert str(error.value).startswith(message)


def test_an_id_occurs_once(tmp_path):
    with pytest.raises(UserError, match="claim 'x' occurs 2 times"):
        claims.load(write(tmp_path, ROW, changed(statement="other")))


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "claims.toml").write_text("[[claim]\n")
    with pytest.raises(UserError, match="claims.toml is not valid TOML"):
        claims.load(tmp_path / "claims.toml")


@pytest.mark.parametrize(("text", "message"), [
    ("", "claims.toml holds no claim"),
    ("claim = []", "claims.toml holds no claim"),
    ('[[claims]]\nid = "x"', "claims.toml: unknown 'claims' at the top; every row begins with [[claim]]"),
    ('title = "t"\n[[claim]]\nid = "x"', "claims.toml: unknown 'title' at the top"),
    ('[claim]\nid = "x"', "claims.toml: claim must be rows that begin with [[claim]], got {'id': 'x'}"),
    ("claim = [1]", "claims.toml: claim must be rows that begin with [[claim]], got [1]"),
])
def test_a_file_without_rows_is_no_empty_ledger(tmp_path, text, message):
    """A typo must not empty README's table."""
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(UserError) as error:
        claims.load(tmp_path / "claims.toml")
    assert str(error.value).startswith(message)


# -- what a cell must be -------------------------------------------------------------------------------------------


def notebook(folder: Path, **changes) -> Path:
    cell = {"cell_type": "code", "execution_count": 1, "metadata": {"tags": ["claim-x"]}, "source": ["assert True"],
            "outputs": [], **changes}
    (folder / "01_a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": []}, cell]}))
    return folder


ERROR = {"output_type": "error", "ename": "AssertionError", "evalue": "", "traceback": []}
STREAM = {"output_type": "stream", "name": "stdout", "text": ["0.5"]}


@pytest.mark.parametrize("changes", [{}, {"source": ["print(0.5)"], "outputs": [STREAM]}])
def test_a_cell_that_ran_and_shows_something_will_do(tmp_path, changes):
    claims.check_cells([claims.Claim(**ROW)], notebook(tmp_path, **changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"metadata": {}}, "claim 'x': no code cell of 01_a.ipynb has the tag 'claim-x'"),
    ({"cell_type": "markdown"}, "claim 'x': no code cell"),
    ({"execution_count": None}, "claim 'x': the cell 'claim-x' of 01_a.ipynb was not run"),
    ({"outputs": [STREAM, ERROR]}, "claim 'x': the cell 'claim-x' of 01_a.ipynb failed"),
    ({"source": ["x = 1\n", "asserted = 2"]},
     "claim 'x': the cell 'claim-x' of 01_a.ipynb shows nothing: no output, no assert"),
])
def test_a_cell_that_shows_nothing_will_not(tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        claims.check_cells([claims.Claim(**ROW)], notebook(tmp_path, **changes))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("seen", "missing"), [
    ("0.5", None), ("12 of 0.50", None), ("0.51", "0.51"), ("10.50 ± 0.2", "10.50"), ("1.5", "1.5")])
def test_a_number_seen_stands_in_the_cell(tmp_path, seen, missing):
    folder = notebook(tmp_path, source=["print(x)"], outputs=[{**STREAM, "text": ["x = 0.504 (was 11.5)"]}])
    row = [claims.Claim(**{**ROW, "seen": seen})]
    if missing is None:
        return claims.check_cells(row, folder)
    with pytest.raises(UserError, match=f"claim 'x': {missing} is said to be seen"):
        claims.check_cells(row, folder)


@pytest.mark.parametrize(("seen", "missing"), [
    ("−0.5", None), ("-0.5", None), ("[−0.5, 0.25]", None), ("0.1–0.25", None), ("0.1-0.25", None),
    ("−log p 0.25", None), ("± 0.5", None), ("−0.25", "-0.25"), ("(−0.1)", "-0.1"), ("−0.75", "-0.75")])
def test_a_sign_seen_stands_in_the_cell(tmp_path, seen, missing):
    output = {**STREAM, "text": ["a = −0.504, b = 0.25; 1-0.75 from 0.1"]}
    folder, row = notebook(tmp_path, outputs=[output]), [claims.Claim(**{**ROW, "seen": seen})]
    if missing is None:
        return claims.check_cells(row, folder)
    with pytest.raises(UserError, match=f"claim 'x': {missing} is said to be seen"):
        claims.check_cells(row, folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cells": [1]}', '{"cells": [{}]}'])
def test_a_file_that_is_no_notebook_is_named(tmp_path, text):
    (tmp_path / "01_a.ipynb").write_text(text)
    with pytest.raises(UserError, match="01_a.ipynb is no notebook"):
        claims.check_cells([claims.Claim(**ROW)], tmp_path)


def test_a_missing_notebook_is_named(tmp_path):
    with pytest.raises(UserError, match="claim 'x': there is no notebook '01_a.ipynb'"):
        claims.check_cells([claims.Claim(**ROW)], tmp_path)


# -- the table and the command -------------------------------------------------------------------------------------


def test_table_shows_each_row_once():
    rows = [claims.Claim(**changed(claimed="|A| ≤ 1", seen="0.5 ± 0.1", note="why")),
            claims.Claim("y", "T", "open", "not tried")]
    assert claims.table(rows).splitlines() == [
        "2 claims: 1 proved, 1 not tried.", "",
        "- **proved**: shown exactly: in symbols, in fractions or by listing every case",
        "- **not tried**: not looked at yet",
        "", "**S**", "", "| claim | claimed | status | seen here | cell |", "|---|---|---|---|---|",
        r"| it holds | \|A\| ≤ 1 | proved | 0.5 ± 0.1. Why | [01](notebooks/01_a.ipynb) `claim-x` |",
        "", "**T**", "", "| claim | claimed | status | seen here | cell |", "|---|---|---|---|---|",
        "| open |  | not tried |  |  |",
    ]  # fmt: skip


def test_put_table_replaces_what_stands_between_the_markers():
    readme = f"# Title\n{claims.BEGIN}\nstale\n{claims.END}\nend\n"
    once = claims.put_table(readme, [claims.Claim(**ROW)])
    assert "stale" not in once and once.startswith("# Title\n") and once.endswith(f"{claims.END}\nend\n")
    assert claims.put_table(once, [claims.Claim(**ROW)]) == once


@pytest.mark.parametrize("readme", ["", claims.BEGIN, f"{claims.END}\n{claims.BEGIN}",
                                    f"{claims.BEGIN}\n{claims.BEGIN}\n{claims.END}"])
def test_put_table_needs_its_markers(readme):
    with pytest.raises(UserError, match="one line <!-- claims:begin -->"):
        claims.put_table(readme, [])


def test_command_writes_a_readme(tmp_path, monkeypatch, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{claims.BEGIN}\n{claims.END}\n", encoding="utf-8")
    monkeypatch.setattr(claims, "data_path", lambda *_: write(tmp_path, ROW))
    monkeypatch.setattr(claims, "notebook_path", lambda *_: notebook(tmp_path))
    assert claims.main(["--write", str(readme)]) == 0
    assert "| it holds |" in readme.read_text(encoding="utf-8")
    assert claims.main([]) == 0 and "| it holds |" in capsys.readouterr().out
    write(tmp_path, changed(status="done"))
    monkeypatch.setattr(claims, "data_path", lambda *_: tmp_path / "claims.toml")
    assert claims.main([]) == 2 and capsys.readouterr().err.startswith("error: claim 'x': unknown status")


def test_runs_as_a_module(repository: Path):
    command = [sys.executable, "-m", "sage_lite.claims", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository)
    assert done.returncode == 0 and "--write" in done.stdout
