"""The ledger of claims: what the papers say, what was shown here, and in which notebook cell.

`data/claims.toml` has one `[[claim]]` a row. A row that says "proved" or "measured" must point at a cell that was run
and passed, so the ledger cannot promise more than the notebooks show. README's table is made from it:

    python -m sage_lite.claims                      # check, and print the table
    python -m sage_lite.claims --write README.md    # check, and put the table between README's markers
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sage_lite.data import data_path, notebook_path
from sage_lite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STATUSES = {
    "proved": "shown exactly: in symbols, in fractions or by listing every case",
    "measured": "seen in numbers, with their uncertainty",
    "direction only": "the sign or the trend is confirmed, the published size is not",
    "contradicted": "our result says otherwise",
    "needs a GPU": "not repeated on the machines we had",
    "not tried": "not looked at yet",
}
SHOWN = ("proved", "measured")
OPEN = ("needs a GPU", "not tried")
_MINUS = r"(?<![\w.)\]])-"  # a sign, and not the dash of a range (0.1-0.3) or a difference (x-0.5)
BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"


@dataclass(frozen=True)
class Claim:
    """One row: who says what (in our words), and what we found.

    `claimed` and `seen` are short texts of numbers, `seen` with an interval where there is one; `notebook` is a file
    name in notebooks/, `tag` the tag of the cell that shows it.
    """

    id: str
    source: str
    statement: str
    status: str
    notebook: str = ""
    tag: str = ""
    claimed: str = ""
    seen: str = ""
    hardware: str = ""
    note: str = ""


def load(path: Path | None = None) -> list[Claim]:
    """The rows of a claims file (default: data/claims.toml), each checked by itself.

    Raises UserError, naming the row, for a file that is no TOML or has anything but [[claim]] rows, or none of them, an
    unknown or missing field, an unknown status, an id that occurs twice, and a status that does not go with the rest of
    the row. Cells are not looked at: `check_cells`.
    """
    path = path or data_path("claims.toml")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no TOML, or no UTF-8
        raise UserError(f"{path.name} is not valid TOML: {error}") from None
    rows = found.pop("claim", [])
    if found:
        raise UserError(f"{path.name}: unknown {next(iter(found))!r} at the top; every row begins with [[claim]]")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path.name}: claim must be rows that begin with [[claim]], got {rows!r:.80}")
    if not rows:
        raise UserError(f"{path.name} holds no claim; every row begins with [[claim]]")
    claims = [_claim(row, number) for number, row in enumerate(rows, start=1)]
    for id, count in Counter(claim.id for claim in claims).items():
        if count > 1:
            raise UserError(f"claim {id!r} occurs {count} times: give every row its own id")
    return claims


def check_cells(claims: list[Claim], notebooks: Path | None = None) -> None:
    """UserError, naming the row, unless each row's cell exists, was run without an error and shows what is seen.

    `notebooks`: their folder. A cell shows something if it has an output or an `assert`; each decimal number of `seen`
    must begin one in the cell's code or output, with its minus sign where it has one. Several cells may share a tag.
    """
    folder = notebooks or notebook_path()
    for claim in (claim for claim in claims if claim.notebook):
        file = folder / claim.notebook
        if not file.is_file():
            raise UserError(f"claim {claim.id!r}: there is no notebook {claim.notebook!r}")
        cells = [c for c in _code_cells(file) if claim.tag in c.get("metadata", {}).get("tags", [])]
        if not cells:
            raise UserError(f"claim {claim.id!r}: no code cell of {claim.notebook} has the tag {claim.tag!r}")
        where = f"the cell {claim.tag!r} of {claim.notebook}"
        for cell in cells:
            if not isinstance(cell.get("execution_count"), int):
                raise UserError(f"claim {claim.id!r}: {where} was not run")
            if any(output["output_type"] == "error" for output in cell["outputs"]):
                raise UserError(f"claim {claim.id!r}: {where} failed")
            if not cell["outputs"] and not re.search(r"^\s*assert\b", "".join(cell["source"]), re.M):
                raise UserError(f"claim {claim.id!r}: {where} shows nothing: no output, no assert")
        text = "\n".join(map(_text, cells)).replace("−", "-")
        for number in re.findall(rf"(?:{_MINUS})?\d+\.\d+", claim.seen.replace("−", "-")):
            if not re.search((_MINUS if number[0] == "-" else r"(?<![\d.])") + re.escape(number.lstrip("-")), text):
                raise UserError(f"claim {claim.id!r}: {number} is said to be seen, but {where} does not show it")


def table(claims: list[Claim]) -> str:
    """The ledger as Markdown: how many rows of each status, and a table for each source, in the file's order."""
    count = Counter(claim.status for claim in claims)
    lines = [f"{len(claims)} claims: " + ", ".join(f"{count[s]} {s}" for s in STATUSES if count[s]) + ".", ""]
    lines += [f"- **{status}**: {meaning}" for status, meaning in STATUSES.items() if count[status]]
    for source in dict.fromkeys(claim.source for claim in claims):
        lines += ["", f"**{source}**", "", "| claim | claimed | status | seen here | cell |", "|---|---|---|---|---|"]
        lines += [_row(claim) for claim in claims if claim.source == source]
    return "\n".join(lines)


def put_table(readme: str, claims: list[Claim]) -> str:
    """`readme` with the table between its two markers; UserError where they are not there once each, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise UserError(f"the text needs one line {BEGIN} and, below it, one line {END}")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table(claims)}\n{END}{rest.split(END)[1]}"


def _claim(row: dict[str, Any], number: int) -> Claim:
    name = f"claim {row['id']!r}" if row.get("id") else f"claim number {number}"
    known = {field.name: field for field in fields(Claim)}
    for key, value in row.items():
        if key not in known:
            raise UserError(f"{name}: unknown field {key!r}; known: {', '.join(known)}")
        if not isinstance(value, str) or "\n" in value:
            raise UserError(f"{name}: {key} must be a text on one line, got {value!r}")
    for key in ("id", "source", "statement", "status"):
        if not row.get(key):
            raise UserError(f"{name}: {key} is missing")
    claim = Claim(**row)
    if claim.status not in STATUSES:
        raise UserError(f"{name}: unknown status {claim.status!r}; choose one of {', '.join(STATUSES)}")
    if bool(claim.notebook) != bool(claim.tag):
        raise UserError(f"{name}: notebook and tag belong together, got {claim.notebook!r} and {claim.tag!r}")
    if claim.status in OPEN and (claim.seen or claim.tag):
        raise UserError(f"{name}: status {claim.status!r}, yet it has a cell or a number seen")
    if claim.status not in OPEN and not claim.tag:
        raise UserError(f"{name}: status {claim.status!r} needs the notebook and the tag of the cell that shows it")
    if claim.status not in (*OPEN, "proved") and not claim.seen:
        raise UserError(f"{name}: status {claim.status!r} needs the number seen")
    if claim.status in ("direction only", "contradicted") and not claim.note:
        raise UserError(f"{name}: status {claim.status!r} needs a note that says why")
    return claim


def _code_cells(file: Path) -> list[dict[str, Any]]:
    try:
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        return [cell for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file.name} is no notebook ({type(error).__name__}: {error}): save it again") from None


def _text(cell: dict[str, Any]) -> str:
    """A cell's code and everything it printed or shows as text."""
    shown = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
    return "\n".join("".join(part) for part in (cell["source"], *shown))


def _row(claim: Claim) -> str:
    seen = ". ".join(part[0].upper() + part[1:] for part in (claim.seen, claim.note, claim.hardware) if part)
    cell = f"[{claim.notebook[:2]}](notebooks/{claim.notebook}) `{claim.tag}`" if claim.tag else ""
    parts = (claim.statement, claim.claimed, claim.status, seen, cell)
    return "| " + " | ".join(part.replace("|", r"\|") for part in parts) + " |"


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's docstring. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sage_lite.claims", description="Check the ledger of claims.")
    parser.add_argument("--write", metavar="README", type=Path, help="put the table between this file's markers")
    options = parser.parse_args(arguments)
    try:
        claims = load()
        check_cells(claims)
        if options.write is None:
            print(table(claims))
        else:
            options.write.write_text(put_table(options.write.read_text(encoding="utf-8"), claims), encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
