"""Fresh environments: the built wheel, and of the suite's own packages those that it asks for.

Nothing is downloaded: a package is a link to the files that this environment has of it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "cce-dist"


def build(root: Path, folder: Path) -> tuple[Path, Path]:
    """The source archive of `root`, and the wheel that is built of nothing but that archive."""
    sdist = _build(root, "sdist", folder)
    # Not by `tarfile`: its releases before 3.11.4 know no filter, and later ones warn without one.
    run(["tar", "--extract", "--file", str(sdist), "--directory", str(folder)])
    return sdist, _build(folder / sdist.name.removesuffix(".tar.gz"), "wheel", folder)


def _build(root: Path, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    run(command, cwd=root)
    (path,) = folder.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[target])
    return path


def metadata_of(wheel: Path) -> importlib.metadata.PackageMetadata:
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        path = wheel.parent / "metadata" / "METADATA"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(archive.read(name))
    return importlib.metadata.PathDistribution(path.parent).metadata


def make_environment(folder: Path, wheel: Path, extra: str) -> Path:
    """The Python of a new environment with the wheel and `extra`, "" for none, "a,b" for two.

    Raises:
        importlib.metadata.PackageNotFoundError: the suite has no package of that name.
        subprocess.CalledProcessError: pip would have to install more.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    requires = metadata_of(wheel).get_all("Requires-Dist") or []
    _link_packages(site, set(_closure(requires, extra)))
    install(python, wheel, extra)
    return python


def install(python: Path, wheel: Path, extra: str) -> None:
    """Has pip install the wheel with `extra` beside what this Python has.

    Raises: as `make_environment`.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    asked = f"{wheel}[{extra}]" if extra else str(wheel)
    run([*pip, "--no-index", "--no-compile", "--disable-pip-version-check", asked])


def _closure(requires: Iterable[str], extra: str) -> Iterable[str]:
    """Names of all packages that these requirements need with these extras, and what those need."""
    waiting = [(text, each) for text in requires for each in extra.split(",")]
    done = set(waiting)
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        yield canonicalize_name(requirement.name)
        theirs = importlib.metadata.requires(requirement.name) or ()
        found = {(text, of) for of in ("", *requirement.extras) for text in theirs} - done
        done |= found
        waiting += found


def _link_packages(site: Path, names: set[str]) -> None:
    wanted: dict[tuple[str, ...], Path] = {}
    others: set[tuple[str, ...]] = set()
    for name, files in _packages():
        for parts, path in files:
            if name in names:
                wanted[parts] = path
            else:
                others.update(parts[: end + 1] for end in range(len(parts)))
    _link(site, wanted, others, 1)


@functools.cache
def _packages() -> list[tuple[str, list[tuple[tuple[str, ...], Path]]]]:
    """Name and files of each package of this environment."""
    return [
        (canonicalize_name(distribution.metadata["Name"]), list(_files(distribution)))
        for distribution in importlib.metadata.distributions()
    ]


def _files(distribution: Distribution) -> Iterable[tuple[tuple[str, ...], Path]]:
    for file in distribution.files or ():
        # Not commands, and nobody's own: what Python has compiled.
        if file.parts[0] not in ("..", "__pycache__"):
            yield file.parts, Path(str(file.locate()))


def _link(
    folder: Path,
    wanted: dict[tuple[str, ...], Path],
    others: set[tuple[str, ...]],
    depth: int,
) -> None:
    """Whole folders where nobody else has files in them, which is most of them."""
    by_name: dict[str, dict[tuple[str, ...], Path]] = defaultdict(dict)
    for parts, path in wanted.items():
        by_name[parts[depth - 1]][parts] = path
    for name, files in by_name.items():
        parts, path = next(iter(files.items()))
        target = folder / name
        if parts[:depth] in others and len(parts) > depth:
            target.mkdir()
            _link(target, files, others, depth + 1)
        else:
            above = len(parts) - depth
            target.symlink_to(path.parents[above - 1] if above else path)


def run(
    command: list[str], *, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """As from a shell that knows nothing of this environment: no PYTHONPATH, no options of pip."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "PYTHON", "TRITON_"))
    }
    where = {**kept, "PIP_CONFIG_FILE": os.devnull, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=cwd, env=where, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done
