"""Loads a `TrainConfig` from a YAML file and dotted overrides, with errors to act on."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cce_dist.train.errors import ConfigError

from .fit_to_ranks import fit_to_ranks
from .schema import TrainConfig


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-4 as a number; by YAML 1.1 it is a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)

_RULES = {
    "greater_than": "be > {gt}",
    "greater_than_equal": "be >= {ge}",
    "less_than": "be < {lt}",
    "less_than_equal": "be <= {le}",
    "literal_error": "be {expected}",
    "int_type": "be an integer",
    "int_from_float": "be an integer",
    "float_type": "be a number",
    "finite_number": "be finite",
    "bool_type": "be true or false",
    "string_type": "be text",
    "path_type": "be a path",
    "no_file_name": "be a name that a file can have",
    "tuple_type": "be a list",
    "model_type": "be a section with keys of its own",
    "string_pattern_mismatch": "match {pattern}",
    "too_long": "have {max_length} entries",
    "missing": "be given",
}


def load_config(
    path: Path, overrides: Sequence[tuple[str, str]] = (), *, num_ranks: int = 1
) -> TrainConfig:
    """Reads a configuration, overrides its keys, fits it to the number of ranks, validates it.

    Args:
        path: a YAML mapping; see docs/guide/training.md for the keys.
        overrides: dotted key and YAML value, for example ("optimizer.lr", "3e-4").
        num_ranks: the job's number of ranks.
    Raises:
        ConfigError: one line for each mistake, with key, rule and value.
    """
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    values = _parse(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, got {values!r}")
    for key, value in overrides:
        _set(values, key, _parse(value, f"--{key}"))
    return make_config(fit_to_ranks(values, num_ranks), str(path))


def make_config(values: dict[str, Any], where: str) -> TrainConfig:
    """Validates values and returns their configuration.

    Args:
        where: the source of the values, for the message.
    Raises:
        ConfigError: `where`, then one line for each mistake.
    """
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        lines = [f"invalid configuration ({where}):", *_describe(error.errors())]
        raise ConfigError("\n".join(lines)) from None


def parse_arguments(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """Parses a file and overrides, in any order.

    ["run.yaml", "--loss.gradient", "exact", "--steps=5"] gives
    Path("run.yaml"), [("loss.gradient", "exact"), ("steps", "5")].

    Raises:
        ConfigError: there is no file or more than one, or an option has no value.
    """
    files, overrides = [], []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("-"):
            files.append(argument)
            continue
        if not argument.startswith("--"):
            raise ConfigError(
                f"unexpected argument {argument!r}: overrides are written --section.key VALUE"
            )
        key, equals, value = argument[2:].partition("=")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{key} must be followed by a value")
            value = remaining.pop(0)
        overrides.append((key.replace("-", "_"), value))
    if len(files) > 1:
        raise ConfigError(
            f"unexpected argument {files[1]!r} after the config file {files[0]}: overrides are "
            "written --section.key VALUE"
        )
    if not files:
        options = " ".join(f"--{key} {value}" for key, value in overrides)
        raise ConfigError(
            f"CONFIG must be given, got only {options}: it is a YAML file, which may be empty"
        )
    return Path(files[0]), overrides


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for depth, section in enumerate(sections):
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            parent = ".".join(sections[: depth + 1])
            raise ConfigError(f"--{key}: {parent} must be a section, got the value {values!r}")
    values[last] = value


def _describe(items: Sequence[Any]) -> list[str]:
    """Describes pydantic's errors, one line for each key.

    pydantic reports an error for each branch of a union.
    """
    rules: dict[str, list[str]] = {}
    got: dict[str, Any] = {}
    lines = []
    for item in items:
        key = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
        if item["type"] == "value_error":
            # The message of a rule over several keys names all of them.
            lines.append(f"  {item['ctx']['error']}")
        elif item["type"] == "extra_forbidden":
            lines.append(f"  unknown key {key}{_suggest(key)}")
        else:
            rules.setdefault(key, []).append(_rule(item))
            got[key] = item["input"]
    for key, alternatives in rules.items():
        lines.append(f"  {key} must {' or '.join(alternatives)}, got {got[key]!r}")
    return lines


def _rule(item: Any) -> str:
    context = {name: _tidy(value) for name, value in item.get("ctx", {}).items()}
    if item["type"] not in _RULES:
        return f"be valid ({item['msg']})"
    return _RULES[item["type"]].format(**context)


def _tidy(value: object) -> object:
    # Bounds of a float key are floats: "> 0" reads better than "> 0.0".
    return f"{value:g}" if isinstance(value, float) else value


def _is_union_branch(part: object) -> bool:
    # pydantic puts the branch of a union into the location: "literal['auto']".
    return isinstance(part, str) and not part.isidentifier()


def _suggest(key: str) -> str:
    known = list(_keys(TrainConfig))
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if not nearest:
        last = key.rsplit(".", 1)[-1]
        nearest = [name for name in known if name.rsplit(".", 1)[-1] == last][:1]
    if not nearest:
        return "; cce-dist train --help lists the keys"
    return f"; did you mean {nearest[0]}?"


def describe_keys() -> list[tuple[str, str]]:
    """Lists each key as an option, with its default and its allowed values."""
    rows = []
    for key, field in _keys(TrainConfig).items():
        if not isinstance(field.default, BaseModel):
            rows.append((f"--{key}", f"[{_yaml(field.default)}] {_kind(field.annotation)}"))
    return rows


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _kind(annotation: Any) -> str:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, parts))
    if get_origin(annotation) is Annotated:
        return _kind(parts[0])
    if get_origin(annotation) is tuple:
        return "list"
    if parts:
        return " or ".join(map(_kind, parts))
    names = {int: "integer", float: "number", bool: "flag", str: "text", Path: "path"}
    return names.get(annotation, "null")


def _keys(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Returns all keys, sections included, by their dotted names."""
    fields = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields |= _keys(annotation, f"{prefix}{name}.")
    return fields
