"""Loads a `TrainConfig` from a YAML file and dotted overrides, with errors to act on."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cce_dist.train.disk import read_text
from cce_dist.train.errors import ConfigError

from .fit_to_ranks import fit_to_ranks
from .schema import TrainConfig


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-4 as a number; by YAML 1.1 it is a string. It refuses a key that
    comes twice, of which PyYAML drops the first, and numbers that YAML 1.1 does not read as they
    look: 010 is 8 there, and 1:30 is 90."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen: set[str] = set()
        for key in keys:
            # A merge may come again.
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} must come once", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> Any:
        is_float = node.tag == _FLOAT
        value = self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)
        if ":" in node.value or (not is_float and re.match(r"[-+]?0[\d_]", node.value)):
            raise yaml.constructor.ConstructorError(
                problem=f"{node.value} must be a decimal number: YAML 1.1 reads it as {value}",
                problem_mark=node.start_mark,
            )
        return value


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.add_constructor(_INT, _Loader.construct_number)
_Loader.add_constructor(_FLOAT, _Loader.construct_number)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)

# Rules of pydantic's errors that its messages do not word as "... should be ...".
_RULES = {
    "missing": "be given",
    "model_type": "be a section with keys of its own",
    "path_type": "be a path",
    "tuple_type": "be a list",
}
_KINDS = {"string": "text", "boolean": "flag", "array": "list"}
_WRITTEN = "overrides are written --section.key VALUE"


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
    values = _parse(read_text(path, "CONFIG"), str(path))
    values = {} if values is None else values
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
        raise ConfigError("\n  ".join(lines)) from None


def parse_arguments(arguments: Sequence[str]) -> tuple[Path, list[tuple[str, str]]]:
    """Parses a file and overrides, in any order.

    ["run.yaml", "--loss.gradient", "exact", "--steps=5"] gives
    Path("run.yaml"), [("loss.gradient", "exact"), ("steps", "5")].

    Raises:
        ConfigError: there is no file or more than one, or an option has no value.
    """
    files, overrides, remaining = [], [], iter(arguments)
    for argument in remaining:
        if not argument.startswith("-"):
            files.append(argument)
            continue
        key, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            raise ConfigError(f"unexpected argument {argument!r}: {_WRITTEN}")
        value = value if equals else next(remaining, "--")
        if not equals and value.startswith("--"):
            raise ConfigError(f"--{key} must be followed by a value")
        overrides.append((key.replace("-", "_"), value))
    if len(files) > 1:
        after = f"{files[1]!r} after the config file {files[0]}"
        raise ConfigError(f"unexpected argument {after}: {_WRITTEN}")
    if not files:
        options = " ".join(f"--{key} {value}" for key, value in overrides)
        raise ConfigError(
            f"CONFIG must be given, got only {options}: it is a YAML file, which may be empty"
        )
    return Path(files[0]), overrides


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    # PyYAML raises the others for dates, tags and numbers that are none, and for deep brackets.
    except (yaml.YAMLError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(f"--{key}: {section} must be a section, got the value {values!r}")
    values[last] = value


def _describe(items: Sequence[Any]) -> list[str]:
    """Describes pydantic's errors, one line for each key."""
    lines, rules = [], {}
    for item in items:
        key, rule = "", re.sub(r"^\w+ should ", "", item["msg"])
        # pydantic reports an error for each branch of a union, whose location ends with the branch.
        for part in item["loc"]:
            longer = f"{key}.{part}".removeprefix(".")
            if isinstance(part, int) or longer in _fields():
                key = longer
        if item["type"] == "value_error":
            # The message of a rule over several keys names all of them.
            lines.append(str(item["ctx"]["error"]))
        elif item["type"] == "extra_forbidden":
            lines.append(_describe_unknown(".".join(map(str, item["loc"]))))
        else:
            rule = _RULES.get(item["type"], rule)
            rules.setdefault(key, (item["input"], []))[1].append(rule)
    return lines + [
        f"{key} must {' or '.join(each)}, got {got!r}" for key, (got, each) in rules.items()
    ]


def _describe_unknown(key: str) -> str:
    last = key.rsplit(".", 1)[-1]
    nearest = difflib.get_close_matches(key, _fields(), n=1, cutoff=0.7)
    nearest += [name for name in _fields() if name.rsplit(".", 1)[-1] == last]
    advice = f"did you mean {nearest[0]}?" if nearest else "cce-dist train --help lists the keys"
    return f"unknown key {key}; {advice}"


def describe_keys() -> list[tuple[str, str]]:
    """Lists each key as an option, with its default, its allowed values and its meaning."""
    return [
        (
            f"--{key}",
            f"[{json.dumps(field['default'])}] {_kind(field)}: {field['meaning']}".replace('"', ""),
        )
        for key, field in _fields().items()
        if not _reference(field)
    ]


def _kind(field: dict[str, Any]) -> str:
    """Describes the values that a field's JSON schema allows."""
    if "anyOf" in field:
        return " or ".join(map(_kind, field["anyOf"]))
    if "enum" in field:
        return ", ".join(field["enum"])
    kind = str(field.get("const", field.get("format", field.get("type"))))
    return _KINDS.get(kind, kind)


@cache
def _fields() -> dict[str, dict[str, Any]]:
    """Returns JSON schema and meaning of all keys, sections included, by their dotted names."""
    schema = TrainConfig.model_json_schema()

    def walk(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        meanings = _meanings(section.get("description", ""))
        for name, field in section["properties"].items():
            yield prefix + name, {**field, "meaning": meanings.get(name, "")}
            if reference := _reference(field):
                inner = schema["$defs"][reference.rsplit("/", 1)[-1]]
                yield from walk(inner, f"{prefix}{name}.")

    return dict(walk(schema, ""))


def _meanings(docstring: str) -> dict[str, str]:
    """Returns the first clause of each argument's text in a docstring without indentation."""
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", docstring, re.M)
    return {
        name: re.split(r" \(|[.:](?: |$)", " ".join(text.split()), maxsplit=1)[0]
        for name, text in entries
    }


def _reference(field: dict[str, Any]) -> str | None:
    """Returns the reference of a section's schema; pydantic before 2.9 wraps it in allOf."""
    return field.get("allOf", [field])[0].get("$ref")
