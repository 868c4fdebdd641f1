"""From a TOML file, the environment and flags to a validated `Config`; and the words for every mistake in them.

Precedence: file, then environment (`SHOAL_NODE__PORT=7000`), then flags (`--set node.port=7000`). A variable is a
setting only if its name has the double underscore: those that container platforms make for a service called shoal are
none. The manifest of a run that exists is never overridden: joiners receive it, a restart reads it from its disk.

Covers: reading, overriding, errors, the printed example. Does not cover: what the tables mean (`config.py`).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..protocol import limits
from ..protocol.errors import ExitCode, ShoalError
from .config import Config, manifest_bytes
from .rl.config import PRINCIPLES_CHARS_MAX, Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "SHOAL_"
CONFIG_BYTES_MAX = 1024 * 1024  # a configuration file is a few KiB; a larger one is some other file
VALUE_CHARS_SHOWN = 80
# Keys of tests alone are not in the example.
HIDDEN = frozenset({"test_hold"})

Key = tuple[str, ...]


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Read the file (none: all defaults), apply environment and `a.b=value` overrides, validate.

    Raises:
        ShoalError: code CONFIG, naming every mistake: missing file, TOML syntax, unknown keys with the nearest known
            one, wrong types, impossible values, named files that are not there.
    """
    where = str(path) if path is not None else "environment and flags"
    text, tree = _read(path) if path is not None else ("", {})
    sources: dict[Key, str] = {}
    for name, value in sorted((environment or {}).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            _put(tree, tuple(name[len(ENV_PREFIX) :].lower().split("__")), value, name, sources)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise _mistake("flags", [f"--set {override}: found no =, expected key=value such as node.port=7000"])
        _put(tree, tuple(key.strip().split(".")), value, "--set", sources)
    problems = [f"{'.'.join(k)}{_place(k, text, sources)}: found {v}, expected a finite number" for k, v in _odd(tree)]
    problems += _take_principles(tree, path.parent if path is not None else Path())
    try:
        config = Config.model_validate(tree, strict=True)
    except ValidationError as error:
        problems += _describe(error.errors(), text, sources)
        raise _mistake(where, problems) from None
    problems += _missing_files(config, text, sources)
    size = len(manifest_bytes(config.run)) if not problems else 0
    if size > limits.MANIFEST_BYTES_MAX:
        problems.append(f"run: the manifest has {size} bytes, expected at most {limits.MANIFEST_BYTES_MAX}")
    if problems:
        raise _mistake(where, problems)
    return config


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        size = path.stat().st_size
        if size > CONFIG_BYTES_MAX:
            raise _mistake(str(path), [f"the file has {size} bytes, expected at most {CONFIG_BYTES_MAX}"])
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise _mistake(str(path), [f"the file cannot be read: {error.strerror}, expected a TOML file"]) from None
    except ValueError as error:  # TOML syntax, or not UTF-8
        raise _mistake(str(path), [f"found something that is not TOML: {error}"]) from None


def _mistake(where: str, problems: Sequence[str]) -> ShoalError:
    return ShoalError(
        f"The configuration has {len(problems)} mistake{'s' if len(problems) > 1 else ''} ({where})",
        values="\n  ".join(problems),
        todo=f"Mend {'them' if len(problems) > 1 else 'it'}; `shoal up --print-config` shows every key.",
        code=ExitCode.CONFIG,
    )


# --- overriding -------------------------------------------------------------------------------------------------------


def _put(tree: dict[str, Any], key: Key, value: str, source: str, sources: dict[Key, str]) -> None:
    table: Any = tree
    for depth, part in enumerate(key[:-1]):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            where = ".".join(key[: depth + 1])
            raise _mistake(source, [f"{'.'.join(key)}: found that {where} is {table!r}, expected a table"])
    field = _field(key)
    table[key[-1]] = _literal(value, field.annotation if field is not None else None)
    sources[key] = source


def _literal(text: str, annotation: Any) -> Any:
    """What a variable or flag means: TOML where it is TOML, else text; for lists also `a,b` and the empty text."""
    kinds = [get_origin(kind) or kind for kind in _options(annotation)]
    if list in kinds and not text.strip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text
    takes_text_alone = bool(kinds) and all(kind in (str, NoneType) for kind in kinds)
    return text if takes_text_alone and not isinstance(value, str) else value


# --- what is known of a key -------------------------------------------------------------------------------------------


def _options(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself. A Literal counts as the types of its values."""
    if isinstance(annotation, type) or annotation is None:
        return [] if annotation is None else [annotation]
    arguments = get_args(annotation)
    if arguments and not all(isinstance(a, type) or get_args(a) for a in arguments):
        return sorted({type(a) for a in arguments}, key=lambda kind: kind.__name__)
    if get_origin(annotation) in (list, dict):
        return [annotation]
    return [option for argument in arguments for option in _options(argument)]


def _table(annotation: Any) -> type[Table] | None:
    kinds = [k for k in (annotation, *get_args(annotation)) if isinstance(k, type) and issubclass(k, Table)]
    return kinds[0] if kinds else None


def _field(key: Key) -> FieldInfo | None:
    table: type[Table] | None = Config
    field = None
    for part in key:
        field = table.model_fields.get(part) if table is not None else None
        if field is None:
            return None
        table = _table(field.annotation)
    return field


def _known(path: Key) -> list[str]:
    field = _field(path)
    table = _table(field.annotation) if field is not None else Config if not path else None
    return list(table.model_fields) if table is not None else []


def _all_keys(table: type[Table] = Config, path: Key = ()) -> Iterator[Key]:
    for name, field in table.model_fields.items():
        yield (*path, name)
        below = _table(field.annotation)
        if below is not None:
            yield from _all_keys(below, (*path, name))


# --- the words for a mistake ------------------------------------------------------------------------------------------


def _describe(errors: Sequence[ErrorDetails], text: str, sources: Mapping[Key, str]) -> list[str]:
    """One line per key: its name, its place, what was found, what was expected."""
    expected: dict[Key, list[str]] = {}
    found: dict[Key, Any] = {}
    lines = []
    for error in errors:
        loc = tuple(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            lines.append(f"{'.'.join(loc)}{_place(loc, text, sources)}: found an unknown key, {_nearest(loc)}")
            continue
        key = _without_union_members(loc)
        message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        before = "" if error["type"] == "value_error" or key in expected else "expected "
        expected.setdefault(key, []).append(before + message)
        found[key] = error["input"]
    for key, messages in expected.items():
        value = "" if isinstance(found[key], dict) else f" found {_short(found[key])},"
        lines.append(f"{'.'.join(key) or 'file'}{_place(key, text, sources)}:{value} {' or '.join(messages)}")
    return lines


def _without_union_members(loc: Key) -> Key:
    """pydantic appends the member of a union that it tried; a list's position is worth keeping."""
    known = 0
    while known < len(loc) and _field(loc[: known + 1]) is not None:
        known += 1
    return loc[:known] + tuple(part for part in loc[known:] if part.isdigit())


def _nearest(loc: Key) -> str:
    for key in _all_keys():
        if key[-1] == loc[-1] and key not in (loc, ("run",), ("node",)) and loc[-1] not in HIDDEN:
            return f"expected it in [{'.'.join(key[:-1])}]"
    near = difflib.get_close_matches(loc[-1], [k for k in _known(loc[:-1]) if k not in HIDDEN], n=1, cutoff=0.0)
    return f"the nearest known one is {near[0]}" if near else "expected no table here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_SHOWN else text[: VALUE_CHARS_SHOWN - 3] + "..."


def _place(key: Key, text: str, sources: Mapping[Key, str]) -> str:
    source = next((s for k, s in sources.items() if key[: len(k)] == k), "")
    line = 0 if source else _line_of(key, text)
    return f" ({source})" if source else f" (line {line})" if line else ""


def _line_of(key: Key, text: str) -> int:
    """Line of a key in the TOML text, as far as one can tell without a parser of positions; 0 where one cannot."""
    current: Key = ()
    best, best_length = 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
        assignment = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line)
        if header:
            full = current = _parts(header[1])
        elif assignment:
            full = current + _parts(assignment[1])
        else:
            continue
        shared = min(len(full), len(key))
        if full[:shared] == key[:shared] and shared > best_length:
            best, best_length = number, shared
    return best


def _parts(dotted: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _odd(tree: Mapping[str, Any], path: Key = ()) -> Iterator[tuple[Key, float]]:
    """Numbers that are none: TOML has nan and inf, JSON and arithmetic that must agree have not."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _odd(value, (*path, name))
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                yield (*path, name), number


def _take_principles(tree: dict[str, Any], folder: Path) -> list[str]:
    """Put the text of a file in place of `principles = "@file"`: the manifest holds what judges read, not where it lay."""
    table: Any = tree
    for key in ("run", "judge"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    value = table.get("principles") if isinstance(table, dict) else None
    if not isinstance(value, str) or not value.startswith("@"):
        return []
    path = folder / Path(value[1:]).expanduser()
    try:
        if path.stat().st_size > 4 * PRINCIPLES_CHARS_MAX:
            return [f"run.judge.principles: {path} is too long, expected at most {PRINCIPLES_CHARS_MAX} characters"]
        table["principles"] = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        return [f"run.judge.principles: {path} cannot be read: {error}"]
    return []


def _missing_files(config: Config, text: str, sources: Mapping[Key, str]) -> list[str]:
    """Files that the configuration names must be there before anything slow begins."""
    run, node = config.run, config.node
    named: dict[Key, str] = {
        ("node", "rewards_file"): node.rewards_file,
        ("node", "model_path"): node.model_path,
        ("run", "rewards", "reward_model"): run.rewards.reward_model,
        ("run", "task", "name"): run.task.name if run.task.name.endswith(".jsonl") else "",
        ("node", "task", "name"): node.task.name if node.task and node.task.name.endswith(".jsonl") else "",
        ("run", "model", "name"): run.model.name if _looks_like_path(run.model.name) and not node.model_path else "",
    }
    return [
        f"{'.'.join(key)}{_place(key, text, sources)}: found {name!r}, expected a file or folder that exists"
        for key, name in named.items()
        if name and not Path(name).expanduser().exists()
    ]


def _looks_like_path(name: str) -> bool:
    return name.endswith(".gguf") or name.startswith(("/", "./", "../", "~"))


# --- the example ------------------------------------------------------------------------------------------------------


def example_config() -> str:
    """A complete TOML file: every key with its meaning, its range and its default, commented out."""
    lines = [
        "# shoal configuration: every key at its default. Remove the # of what you change.",
        "# [run] is the manifest, equal on all peers: the founder's counts. [node] is this node's alone.",
    ]
    _example(lines, Config(), ())
    return "\n".join(lines) + "\n"


def _example(lines: list[str], values: Table, path: Key, *, absent: bool = False) -> None:
    if path:
        about = (values.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"# {about}{' Absent by default.' if absent else ''}"]
        lines.append(f"{'# ' if absent else ''}[{'.'.join(path)}]")
    below: list[tuple[str, Table, bool]] = []
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        kind = _table(field.annotation)
        if kind is not None:
            below.append((name, kind() if value is None else value, absent or value is None))
        elif name not in HIDDEN:
            lines += [f"# {line.strip()}" for line in (field.description or "").splitlines()]
            lines.append(f"# {name} = {_toml(value)}{_range(field)}" if value is not None else _absent(name, field))
    for name, table, is_absent in below:
        _example(lines, table, (*path, name), absent=is_absent)


def _absent(name: str, field: FieldInfo) -> str:
    kinds = " or ".join(kind.__name__ for kind in _options(field.annotation) if kind is not NoneType)
    return f"# {name} =   # absent; {kinds}{_range(field).replace('  #', ',')}"


def _range(field: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{word} {getattr(m, name):,}" for m in field.metadata for name, word in words.items() if hasattr(m, name)
    ]
    return f"  # {', '.join(bounds)}" if bounds else ""


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    return json.dumps(value, ensure_ascii=False)
