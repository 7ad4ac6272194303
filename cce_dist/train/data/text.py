"""Sources of text: documents of the Python installation, or the user's files."""

from __future__ import annotations

import json
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from cce_dist.train.disk import read_text
from cce_dist.train.errors import ConfigError

DOCUMENT_SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
# One huge generated table must not crowd out all other text.
MAX_DOCUMENT_CHARS = 60_000


def collect_documents(paths: Sequence[Path], megabytes: float) -> list[str]:
    """Returns text of about `megabytes` million characters, the same on every call.

    Without `paths`: sources and documents of the standard library and of site-packages, in a
    shuffled order that depends on their names alone. With `paths`: files, and folders (searched for
    DOCUMENT_SUFFIXES and JSONL), in the given order. A document that is not UTF-8 is skipped in a
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
        # A package's JSONL is data of any kind.
        unordered = {file for root in roots for file in _files_in(Path(root), DOCUMENT_SUFFIXES)}
        files = sorted(unordered, key=_names_of)
        # In the order of their names, the first megabytes would all come from the same package.
        random.Random(0).shuffle(files)
        yield from _read_files(files)
    for path in paths:
        # isdir is False for an unreadable path: reading then raises the reason.
        if os.path.isdir(path):
            suffixes = DOCUMENT_SUFFIXES + JSONL_SUFFIXES
            yield from _read_files(sorted(_files_in(path, suffixes), key=_names_of))
        elif path.suffix in JSONL_SUFFIXES:
            yield from _read_jsonl(path)
        else:
            yield read_text(path, "data.paths")


def _files_in(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    # Path.rglob takes a second more for the 50,000 documents of a Python installation.
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.splitext(name)[1] in suffixes and os.path.isfile(path):
                yield path


def _names_of(path: str) -> list[str]:
    """Returns the names of a path's folders and file, which `pathlib` orders paths by."""
    return path.split(os.sep)


def _read_files(files: Sequence[str]) -> Iterator[str]:
    for path in map(Path, files):
        if path.suffix in JSONL_SUFFIXES:
            yield from _read_jsonl(path)
            continue
        try:
            with path.open(encoding="utf8") as file:
                yield file.read(MAX_DOCUMENT_CHARS)
        except (OSError, UnicodeDecodeError):
            continue


def _read_jsonl(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_field(line.strip(), f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"data.paths: cannot read {path}: {error.strerror}") from None


def _text_field(encoded: bytes, where: str) -> str:
    record, reason, line = None, "", encoded.decode(errors="backslashreplace")
    try:
        record = json.loads(encoded.decode())
    except (ValueError, RecursionError) as error:
        # Python raises the latter for thousands of brackets.
        reason = f": {error}"
    if not isinstance(record, dict):
        shown = repr(line if len(line) <= 60 else line[:57] + "...")
        raise ConfigError(f"{where}: each line must be a JSON object, got {shown}{reason}")
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
