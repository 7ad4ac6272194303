"""Sources of text: documents of the Python installation, or the user's files."""

from __future__ import annotations

import json
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from cce_dist.train.errors import ConfigError

DOCUMENT_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# One huge generated table must not crowd out all other text.
MAX_DOCUMENT_CHARS = 60_000


def collect_documents(paths: Sequence[Path], megabytes: float) -> list[str]:
    """Returns text of about `megabytes` million characters, the same on every call.

    Without `paths`: sources and documents of the standard library and of site-packages, in a
    shuffled order that depends on their names alone. With `paths`: files, and folders (searched for
    DOCUMENT_SUFFIXES and JSONL), in the given order. A file that is not UTF-8 is skipped in a
    folder, and refused if `paths` names it. Of documents with the same start only the first counts.

    Raises:
        ConfigError: a path cannot be read, JSONL is malformed, or there is no text at all.
    """
    documents, seen, num_chars = [], set(), 0
    for text in _read_all(paths):
        start = text[:2000]
        if not text.strip() or start in seen:
            continue
        seen.add(start)
        documents.append(text)
        num_chars += len(text)
        if num_chars >= megabytes * 1e6:
            break
    if not documents:
        where = ", ".join(str(path) for path in paths) or "this Python installation"
        raise ConfigError(f"data.paths must hold some text, got none in {where}")
    return documents


def _read_all(paths: Sequence[Path]) -> Iterator[str]:
    if not paths:
        roots = sorted({sysconfig.get_paths()[name] for name in ("stdlib", "purelib")})
        files = sorted({file for root in roots for file in _files_in(Path(root))})
        # In the order of their names, the first megabytes would all come from the same package.
        random.Random(0).shuffle(files)
        yield from _read_files(files)
    for path in paths:
        # isdir is False for an unreadable path: reading then raises the reason.
        if os.path.isdir(path):
            yield from _read_files(sorted(_files_in(path)))
        elif path.suffix in JSONL_SUFFIXES:
            yield from _read_jsonl(path)
        else:
            yield read_text(path, "data.paths")


def _files_in(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.suffix in DOCUMENT_SUFFIXES + JSONL_SUFFIXES and path.is_file():
            yield path


def _read_files(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix in JSONL_SUFFIXES:
            yield from _read_jsonl(path)
            continue
        try:
            with path.open(encoding="utf8") as file:
                yield file.read(MAX_DOCUMENT_CHARS)
        except (OSError, UnicodeDecodeError):
            continue


def read_text(path: Path, argument: str) -> str:
    """Reads a UTF-8 file.

    Args:
        argument: the key or option that names the file, for the message.
    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf8")
    except OSError as error:
        raise ConfigError(f"{argument}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{argument}: {path} must be UTF-8 text, got the byte "
            f"0x{error.object[error.start]:02x} at offset {error.start}"
        ) from None


def _read_jsonl(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_field(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"data.paths: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.paths: {path} must be UTF-8: {error.reason}") from None


def _text_field(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: each line must be a JSON object, got {_shorten(line)} ({error.msg} at "
            f"column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:
        # Python raises these for a number of thousands of digits, and for thousands of brackets.
        raise ConfigError(f"{where}: each line must be a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: each line must be a JSON object, got {_shorten(line)}")
    text = record.get("text")
    if not isinstance(text, str):
        contents = f"fields {sorted(record)}" if "text" not in record else f"text={text!r}"
        raise ConfigError(f'{where}: each object must have a field "text" of text, got {contents}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(
            f'{where}: "text" must be Unicode, got {half}, half of a character, at offset '
            f"{error.start}: write the character whole, or \\ufffd"
        ) from None
    return text


def _shorten(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else line[:57] + "...")
