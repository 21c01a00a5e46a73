"""Where a task's rows come from: a local file or folder, the hub, or a list; and how they are split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from sage_lite.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")

Columns = Mapping[str, str]  # our field -> the data set's column
Convert = Callable[[dict], dict]  # checks one row and returns ours; ValueError says what is wrong with it


def read(
    data: str | Path | Sequence[dict], config: str | None, alternatives: Sequence[Columns], convert: Convert
) -> dict[str, list[dict]]:
    """Reads, checks and converts rows: ``{"train": …, "test": …}`` where the split is official, else ``{"all": …}``.

    ``data``: an existing file (JSONL, JSON, Parquet); a folder with ``train*`` and ``test*`` files; a hub id
    ``owner/name`` (with ``config``); or a list of dicts. The first of ``alternatives`` whose columns are all there is
    used; ``convert`` gets a dict with its fields. Raises ``UserError`` for anything missing or malformed, naming the
    file and line, or the row.
    """
    if isinstance(data, (str, Path)):
        path = Path(data).expanduser()
        if path.is_dir():
            files = {part: _folder_file(path, part) for part in ("train", "test")}
            parts = {part: _file(file, alternatives, convert) for part, file in files.items() if file is not None}
            return parts if "test" in parts else {"all": parts["train"]}
        if path.exists():
            return {"all": _file(path, alternatives, convert)}
        if path.suffix.lower() in SUFFIXES:
            raise UserError(f"the file {data} does not exist")
        if not isinstance(data, str) or data.count("/") != 1 or data[0] in "./~\\" or data.endswith("/"):
            raise UserError(
                f"{str(data)!r} is neither a file or folder here nor a hub id: give a path to {', '.join(SUFFIXES)}, "
                "or owner/name of a data set on the hub"
            )
        return _hub(data, config, alternatives, convert)
    rows = list(data)
    columns = list(rows[0]) if rows and isinstance(rows[0], Mapping) else []
    return {"all": _convert(enumerate(rows), "row {} of the list".format, columns, "the list", alternatives, convert)}


def _folder_file(folder: Path, part: str) -> Path | None:
    files = sorted(file for file in folder.iterdir() if file.stem.startswith(part) and file.suffix.lower() in SUFFIXES)
    if len(files) > 1:
        raise UserError(f"{folder} holds several {part} files: name one of {', '.join(file.name for file in files)}")
    if not files and part == "test" and _folder_file(folder, "train") is None:
        raise UserError(f"{folder} holds no file named train… or test… with the ending {', '.join(SUFFIXES)}")
    return files[0] if files else None


def _file(path: Path, alternatives: Sequence[Columns], convert: Convert) -> list[dict]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"cannot read {path}: the file's ending must be {', '.join(SUFFIXES)}")
    try:
        if suffix == ".parquet":
            import pyarrow.parquet

            file = pyarrow.parquet.ParquetFile(path)
            columns = file.schema_arrow.names
            rows = file.read(columns=_match(columns, str(path), alternatives).values()).to_pylist()
            return _convert(enumerate(rows), f"{path}, row {{}}".format, columns, str(path), alternatives, convert)
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a readable Parquet file: {error}") from None
    if suffix == ".json" and text.lstrip().startswith("["):
        rows, where = list(enumerate(_json(text, str(path)))), f"{path}, row {{}}".format
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        rows, where = [(number, _json(line, f"{path}:{number}")) for number, line in lines], f"{path}:{{}}".format
    columns = list(rows[0][1]) if rows and isinstance(rows[0][1], dict) else []
    return _convert(rows, where, columns, str(path), alternatives, convert)


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None


def _hub(name: str, config: str | None, alternatives: Sequence[Columns], convert: Convert) -> dict[str, list[dict]]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config) if config else datasets.load_dataset(name)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"could not load {name!r} from the hub: {reason} (without a network, give a local file, "
            "or leave data out for generated problems)"
        ) from error
    tables = {}
    for part, table in loaded.items():
        columns = _match(table.column_names, f"{name} ({part})", alternatives)
        rows = enumerate(table.select_columns(sorted(set(columns.values()))))
        tables[part] = _convert(
            rows, f"{name} ({part}), row {{}}".format, table.column_names, name, alternatives, convert
        )
    test = tables.get("test", tables.get("validation"))
    if test is None:
        return {"all": [row for rows in tables.values() for row in rows]}
    return {"train": tables["train"], "test": test} if "train" in tables else {"test": test}


def _match(columns: Iterable[str], name: str, alternatives: Sequence[Columns]) -> Columns:
    found = list(columns)
    for wanted in alternatives:
        if set(wanted.values()) <= set(found):
            return wanted
    wanted = " or ".join(", ".join(dict.fromkeys(columns.values())) for columns in alternatives)
    raise UserError(f"{name} has the columns {', '.join(map(str, found)) or '(none)'}; this task needs {wanted}")


def _convert(
    rows: Iterable[tuple[int, object]],
    where: Callable[[int], str],
    columns: Iterable[str],
    name: str,
    alternatives: Sequence[Columns],
    convert: Convert,
) -> list[dict]:
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{name} is empty: no rows")
    if not isinstance(first[1], Mapping):
        raise UserError(f"{where(first[0])}: expected an object with columns, not {str(first[1])[:80]!r}")
    wanted = _match(columns, name, alternatives)
    converted = []
    for number, row in (first, *rows):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"expected an object with columns, not {str(row)[:80]!r}")
            missing = sorted(column for column in wanted.values() if column not in row)
            if missing:
                raise ValueError(f"lacks {', '.join(missing)}")
            converted.append(convert({field: row[column] for field, column in wanted.items()}))
        except ValueError as error:
            raise UserError(f"{where(number)}: {error}") from None
    return converted


def digest(*parts: object) -> str:
    """A fixed pseudo-random key of some values, the same in every process and Python version (unlike ``hash``)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def hold_out(
    rows: Sequence[dict], key: Callable[[dict], Hashable], test_size: int | None, seed: int
) -> tuple[list[dict], list[dict]]:
    """Shuffles rows by a digest of ``seed`` and ``key(row)``; holds out ``test_size`` distinct keys: ``(train, test)``.

    Rows with an equal key (the same problem twice) never stand on both sides; the test part has one row a key.
    ``None`` holds out a fifth, at most 400. Raises ``UserError`` if nothing would be left to train on.
    """
    problems: dict[Hashable, list[dict]] = {}
    for row in rows:
        problems.setdefault(key(row), []).append(row)
    if test_size is None:
        test_size = min(400, max(1, len(problems) // 5))
    if not 0 <= test_size < len(problems):
        raise UserError(
            f"cannot hold out {test_size} of {len(problems)} distinct problems for the test and train on the rest: "
            "choose another test_size, or split='train' or 'test' to use all of them as one part"
        )
    order = sorted(problems, key=lambda problem: digest(seed, problem))
    train = [row for problem in order[test_size:] for row in problems[problem]]
    return train, [problems[problem][0] for problem in order[:test_size]]
