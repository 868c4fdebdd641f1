"""From a TOML file, or a name of the shipped library, to a checked `Scenario`; and the words for every mistake in it.

Covers: finding, reading, unknown keys with the nearest known one, the place of a mistake. Does not cover what the tables mean
(`scenario.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..node.config_file import CONFIG_BYTES_MAX, VALUE_CHARS_SHOWN, tomllib
from ..protocol.errors import ExitCode, ShoalError
from .scenario import Scenario

LIBRARY = Path(__file__).parent / "scenarios"

Key = tuple[str | int, ...]


def library() -> dict[str, Path]:
    """The shipped scenarios, by name."""
    return {path.stem: path for path in sorted(LIBRARY.glob("*.toml"))}


def load_scenario(name: str) -> Scenario:
    """A name of the library, or a path (anything with a slash or an ending).

    Raises ShoalError, code CONFIG, naming every mistake: no such scenario, TOML syntax, unknown keys, impossible values.
    """
    shipped = library()
    path = shipped.get(name, Path(name))
    if path.suffix != ".toml" and not path.exists():
        near = difflib.get_close_matches(name, list(shipped), n=1)
        raise ShoalError(
            "There is no such scenario",
            values=f"found {name!r}, expected a TOML file or one of {', '.join(shipped)}",
            todo=f"Did you mean {near[0]}?" if near else "`shoal sim --list` says what each of them shows.",
            code=ExitCode.CONFIG,
        )
    return parse_scenario(_read(path), str(path))


def parse_scenario(text: str, where: str) -> Scenario:
    """The scenario in a TOML text; `where` it is from is for the error messages. Raises ShoalError."""
    try:
        tree = tomllib.loads(text)
    except ValueError as error:
        raise _mistakes(where, [f"found something that is not TOML: {error}"]) from None
    try:
        return Scenario.model_validate(tree, strict=True)
    except ValidationError as error:
        raise _mistakes(where, list(_lines(error.errors(), text))) from None


def _read(path: Path) -> str:
    try:
        length = path.stat().st_size
        if length > CONFIG_BYTES_MAX:
            raise _mistakes(str(path), [f"the file has {length} bytes, expected at most {CONFIG_BYTES_MAX}"])
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _mistakes(str(path), [f"the file cannot be read: {error.strerror}, expected a TOML file"]) from None
    except ValueError:
        raise _mistakes(str(path), ["the file is not UTF-8 text, expected a TOML file"]) from None


def _mistakes(where: str, problems: Sequence[str]) -> ShoalError:
    return ShoalError(
        f"The scenario has {len(problems)} mistake{'s' if len(problems) > 1 else ''} ({where})",
        values="\n  ".join(problems),
        todo="docs/simulator.md lists every table and key; the shipped scenarios are examples.",
        code=ExitCode.CONFIG,
    )


# --- the words for a mistake ------------------------------------------------------------------------------------------


def _lines(errors: Sequence[ErrorDetails], text: str) -> Iterator[str]:
    """One line per mistake: key, place, what was found, what was expected."""
    said: set[Key] = set()
    for error in errors:
        path, table = _walk(error["loc"])
        if path in said:
            continue  # the other members of a union
        said.add(path)
        line = _line_of(path, text)
        where = f"{_dotted(path) or 'file'}{f' (line {line})' if line else ''}"
        if error["type"] == "extra_forbidden":
            names = list(table.model_fields) if table is not None else []
            near = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.0)
            yield f"{where}: found an unknown key, {f'the nearest known one is {near[0]}' if near else 'expected none'}"
        elif error["type"] == "missing":
            yield f"{where}: found nothing, expected this key"
        elif error["type"].startswith("union_tag"):
            yield f"{where}: {_tag(error)}"
        else:
            message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
            value = "" if isinstance(error["input"], dict | BaseModel) else f"found {_short(error['input'])}, "
            yield f"{where}: {value}{message}"


def _walk(loc: Sequence[str | int]) -> tuple[Key, type[BaseModel] | None]:
    """The key as the file has it (pydantic adds the member of a union that it tried), and the table that it is in."""
    path: list[str | int] = []
    table: Any = Scenario
    kinds: list[Any] = [Scenario]
    for k, part in enumerate(loc):
        models = [m for m in kinds if isinstance(m, type) and issubclass(m, BaseModel)]
        if isinstance(part, int):
            path.append(part)
        elif len(models) > 1:  # the tag of a union of tables: not in the file
            kinds = [m for m in models if part in get_args(m.model_fields["kind"].annotation)]
            table = kinds[0] if kinds else None
        elif models:
            table = models[0]
            field = table.model_fields.get(part)
            path.append(part)
            kinds = _tables(field.annotation) if field is not None else []
            if field is None and k == len(loc) - 1:
                break
            if not kinds:  # a plain value: what follows are members of its union
                path += [p for p in loc[k + 1 :] if isinstance(p, int)]
                break
            if field is not None and _is_mapping(field.annotation) and k + 1 < len(loc):
                return (*path, *loc[k + 1 : k + 3]), kinds[0]  # its tables hold plain values
        else:
            path.append(part)
    return tuple(path), table


def _tables(annotation: Any) -> list[Any]:
    """The models in an annotation, whatever lists and unions they are wrapped in."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables(argument)]


def _is_mapping(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _tag(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "union_tag_not_found":
        return "found no kind, expected kind = one of the faults"
    known = [name.strip("' ") for name in str(context.get("expected_tags", "")).split(",")]
    near = difflib.get_close_matches(str(context.get("tag", "")), known, n=1, cutoff=0.0)
    return f"found kind = {_short(context.get('tag'))}, the nearest known one is {near[0]}" if near else error["msg"]


def _dotted(path: Key) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= VALUE_CHARS_SHOWN else shown[: VALUE_CHARS_SHOWN - 3] + "..."


def _line_of(key: Key, text: str) -> int:
    """Line of a key, or of the nearest table around it; 0 where one cannot tell without a real parser of positions."""
    current: Key = ()
    counts: dict[Key, int] = {}
    best, best_length = 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        assignment = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if header:
            current = _indexed(_parts(header[2]), counts, new=header[1] == "[[")
            full = current
        elif assignment:
            full = (*current, *_parts(assignment[1]))
        else:
            continue
        shared = min(len(full), len(key))
        if full[:shared] == key[:shared] and shared > best_length:
            best, best_length = number, shared
    return best


def _indexed(path: tuple[str, ...], counts: dict[Key, int], *, new: bool) -> Key:
    """A header's path with the positions in arrays of tables that it is at."""
    full: Key = ()
    for depth, part in enumerate(path):
        full = (*full, part)
        if new and depth == len(path) - 1:
            counts[full] = counts.get(full, -1) + 1
        if full in counts:
            full = (*full, counts[full])
    return full


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
