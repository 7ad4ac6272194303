"""The layers of docs/design/architecture.md by the source's syntax trees; sizes, names, links."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

import cce_dist
from tests.layers import (
    ANY,
    LAYERS,
    ONLY,
    ONLY_IN,
    PUBLIC,
    ROW,
    TORCH_DISTRIBUTED_IN,
    TORCH_DISTRIBUTED_TYPES_IN,
)

ROOT = Path(__file__).parent.parent
PACKAGES = ("cce_dist", "megatron_patch", "benchmarks")
# Beside cce_dist: they stand above it.
OTHERS = {"megatron_patch", "benchmarks"}

MAX_FILES = 14  # of a folder
MAX_ROOT_FILES = 10  # of cce_dist/ itself

MAX_FILE_LINES = 400  # aim at 300
MAX_FUNCTION_LINES = 60  # after the docstring
MAX_KERNEL_LINES = 120


class Import(NamedTuple):
    name: str  # dotted, absolute
    line: int
    for_types_only: bool


def imports(source: str, package: str = "cce_dist") -> Iterator[Import]:
    """What `source`, a module of `package`, imports at any depth or uses as `torch.x`."""

    def visit(node: ast.AST, for_types_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, for_types_only)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                yield Import(".".join([*base, alias.name]), node.lineno, for_types_only)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("torch", "cce_dist"):
                yield Import(f"{node.value.id}.{node.attr}", node.lineno, for_types_only)
        elif isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, for_types_only)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, for_types_only)

    yield from visit(ast.parse(source), False)


def longest_of(names: Collection[str], module: str) -> str | None:
    """Which of `names`, folders and files of cce_dist, has `module`; the longest, if any."""
    found = [name for name in names if f"{module}.".startswith(f"{name}.")]
    return max(found, key=len, default=None)


def layer_of(name: str, *, is_file: bool = False) -> str:
    """Of "cce_dist/backends/choose.py", a file, and of "cce_dist.backends.choose.x": "backends"."""
    package, _, rest = name.removesuffix(".py").replace("/", ".").partition(".")
    if package != "cce_dist":
        return package
    layer = longest_of(ROW, rest)
    if layer is None:
        return PUBLIC if rest == "__init__" or not is_file else rest
    return layer


def violations(path: str, source: str) -> Iterator[str]:
    """How the module at `path` breaks the rules above, a sentence each."""
    layer = layer_of(path, is_file=True)
    module = path.removesuffix(".py").replace("/", ".").removeprefix("cce_dist.")
    parents = path.removesuffix(".py").split("/")[:-1]
    if layer not in ROW and layer not in OTHERS:
        yield f"{path}: `{layer}` has no place in LAYERS; add it to tests/test_layout.py"
        return
    for name, line, for_types_only in imports(source, ".".join(parents)):
        where = f"{path}:{line}"
        top = name.partition(".")[0]
        if top == "cce_dist":
            target = layer_of(name)
            if target == layer:
                continue
            if layer in ROW and ROW[target] >= ROW[layer]:
                yield f"{where}: `{layer}` imports `{target}`, which is not below it"
            elif target not in ONLY.get(layer, {target}):
                yield f"{where}: `{layer}` may not import `{target}`"
            elif layer not in ONLY_IN.get(target, {layer}):
                yield f"{where}: only {sorted(ONLY_IN[target])} may import `{target}`"
        elif top == "benchmarks" != layer:
            yield f"{where}: `{layer}` may not import benchmarks, which is no part of the package"
        elif f"{name}.".startswith("torch.distributed."):
            allowed = TORCH_DISTRIBUTED_IN | OTHERS
            if for_types_only:
                allowed |= TORCH_DISTRIBUTED_TYPES_IN
            if longest_of(allowed, module) is None:
                yield f"{where}: `{layer}` may not import torch.distributed"
        elif layer in ROW and top not in sys.stdlib_module_names:
            allowed = LAYERS[ROW[layer]][layer]
            if allowed is not ANY and top not in allowed:
                yield f"{where}: `{layer}` may not import {top}"


def source_files() -> list[str]:
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_layers(path: str) -> None:
    assert list(violations(path, read(path))) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param("cce_dist/options.py", "from cce_dist import loss", id="upward"),
        pytest.param("cce_dist/options.py", "from . import loss", id="upward, relative"),
        pytest.param(
            "cce_dist/backends/triton/kernels/backward/sdd.py",
            "from .....loss import x",
            id="upward from folder",
        ),
        pytest.param(
            "cce_dist/backends/choose.py",
            "def f():\n import cce_dist.algorithm.sharded",
            id="in function",
        ),
        pytest.param(
            "cce_dist/backends/choose.py", "from cce_dist import Filter", id="public from below"
        ),
        pytest.param("cce_dist/__init__.py", "from .planner import plan", id="above public"),
        pytest.param("cce_dist/loss.py", "from cce_dist.reference import x", id="reference"),
        pytest.param("cce_dist/cli/main.py", "import cce_dist.testing", id="testing"),
        pytest.param("cce_dist/reference.py", "import cce_dist.core.allocations", id="narrow"),
        pytest.param(
            "cce_dist/backends/triton/kernels/backward/sdd.py",
            "import torch",
            id="kernels: triton only",
        ),
        pytest.param("cce_dist/planner/cost/layer.py", "import torch", id="planner: no torch"),
        pytest.param("cce_dist/backends/choose.py", "import triton", id="triton"),
        pytest.param("cce_dist/loss.py", "import torch.distributed as dist", id="distributed"),
        pytest.param(
            "cce_dist/backends/choose.py", "from torch import distributed", id="distributed, from"
        ),
        pytest.param(
            "cce_dist/backends/choose.py", "torch.distributed.barrier()", id="distributed, used"
        ),
        pytest.param("cce_dist/train/loop.py", "from cce_dist.loss import x", id="train: public"),
        pytest.param(
            "cce_dist/train/loop.py", "cce_dist.algorithm.sharded.f()", id="train: by attribute"
        ),
        pytest.param(
            "megatron_patch/x.py", "from cce_dist.algorithm import sharded", id="megatron_patch"
        ),
        pytest.param("cce_dist/bench/cli.py", "import benchmarks.cli", id="benchmarks"),
        pytest.param("cce_dist/unheard_of.py", "", id="a module without a layer"),
    ],
)
def test_layers_refuse(path: str, source: str) -> None:
    assert len(list(violations(path, source))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        pytest.param(
            "cce_dist/loss.py",
            "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup",
            id="for types only",
        ),
        pytest.param("cce_dist/train/loop.py", "from cce_dist import Filter", id="public"),
        pytest.param("cce_dist/train/loop.py", "from .text import read", id="same folder"),
        pytest.param(
            "cce_dist/backends/triton/kernels/backward/sdd.py",
            "import triton.language as tl",
            id="kernel",
        ),
        pytest.param("cce_dist/backends/torch/forward.py", "from .x import f", id="backend"),
        pytest.param("cce_dist/bench/run.py", "from cce_dist import reference", id="bench"),
        pytest.param("megatron_patch/x.py", "import cce_dist, torch.distributed", id="patch"),
        pytest.param("benchmarks/x.py", "from cce_dist.bench import golden", id="benchmarks"),
    ],
)
def test_layers_accept(path: str, source: str) -> None:
    assert list(violations(path, source)) == []


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Which modules of the packages import which, those for types alone and in functions too."""
    graph: dict[str, set[str]] = {module_of(path): set() for path in source_files()}
    for path in source_files():
        for name, *_ in imports(read(path), ".".join(path.split("/")[:-1])):
            while name and name not in graph:
                name = name.rpartition(".")[0]  # of a module's own name its module
            if name:
                graph[module_of(path)].add(name)
    return graph


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 6])
def test_no_import_circles(depth: int) -> None:
    """Between files, and between folders of that depth: a folder imports what its files import."""
    folders: dict[str, set[str]] = {}
    for importer, imported in import_graph().items():
        first, *others = (".".join(name.split(".")[:depth]) for name in (importer, *imported))
        folders.setdefault(first, set()).update(name for name in others if name != first)
    try:
        graphlib.TopologicalSorter(folders).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_import_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules);"
        "import cce_dist; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    heavy = {"triton", "megatron", "matplotlib", "typer", "pydantic", "rich", "yaml", "mpi4py"}
    heavy |= {
        f"cce_dist.{name}"
        for name in ("backends.triton.kernels", "planner", "train", "testing", "bench")
    }
    assert not loaded & heavy


@pytest.mark.parametrize("path", source_files(), ids=str)
def test_sizes(path: str) -> None:
    source = read(path)
    assert len(source.splitlines()) <= MAX_FILE_LINES, "split it; aim at 300 lines"
    limit = (
        MAX_KERNEL_LINES
        if layer_of(path, is_file=True) == "backends.triton.kernels"
        else MAX_FUNCTION_LINES
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            start = node.body[0].end_lineno + 1 if has_docstring else node.body[0].lineno
            assert node.end_lineno - start + 1 <= limit, f"{path}: {node.name} is too long"


def test_test_files_are_short() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_folders_are_small() -> None:
    folders = ("cce_dist", "megatron_patch", "benchmarks", "tests", "launch", "docs")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.*"))
    files = (path for path in paths if path.is_file() and path.suffix != ".pyc")
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    limits = {"cce_dist": MAX_ROOT_FILES}
    assert {
        name: count for name, count in counts.items() if count > limits.get(name, MAX_FILES)
    } == {}


def test_public_names_have_docstrings() -> None:
    for name in getattr(cce_dist, "__all__", ()):
        value = getattr(cce_dist, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            # A dataclass without a docstring gets its signature as one.
            assert value.__doc__, name
            assert not value.__doc__.startswith(f"{name}("), name


def pygrep_hooks() -> list[dict[str, str]]:
    config = yaml.safe_load(read(".pre-commit-config.yaml"))
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    return [hook for hook in hooks if hook["language"] == "pygrep"]


@pytest.mark.parametrize("hook", pygrep_hooks(), ids=lambda hook: hook["id"])
def test_banned_patterns(hook: dict[str, str]) -> None:
    folders = (*PACKAGES, "launch", "tests")
    found = (path for name in folders for path in (ROOT / name).rglob("*.*") if path.is_file())
    paths = [path.relative_to(ROOT).as_posix() for path in found]
    for path in paths:
        if re.search(hook["files"], path):
            for number, line in enumerate(read(path).splitlines(), 1):
                assert not re.search(hook["entry"], line), f"{path}:{number}: {hook['name']}"


def documents() -> list[str]:
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@pytest.mark.parametrize("path", documents(), ids=str)
def test_documents_name_existing_files(path: str) -> None:
    pattern = (
        r"(?<![\w-])(?<!\w/)(?:cce_dist|megatron_patch|benchmarks|launch|docs|tests)/"
        r"[A-Za-z0-9_./-]+\.(?:py|sh|md|yaml|yml|toml|csv|json|png)\b"
    )
    assert [name for name in re.findall(pattern, read(path)) if not (ROOT / name).exists()] == []


def without_code(markdown: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.M | re.S)


def headings(path: Path) -> set[str]:
    """The anchors that GitHub gives a Markdown file's headings."""
    text = without_code(path.read_text(encoding="utf-8"))
    anchors: set[str] = set()
    for title in re.findall(r"^#+ +(.+?)(?: +#+)? *$", text, flags=re.M):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        same = sum(
            re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in anchors
        )
        anchors.add(f"{slug}-{same}" if same else slug)
    return anchors


@pytest.mark.parametrize("path", [*documents(), *source_files()], ids=str)
def test_links_resolve(path: str) -> None:
    text = read(path)
    # Named from the root, as in a docstring, and, in Markdown, linked from where the document is.
    links = [
        (ROOT / name, tag) for name, tag in re.findall(r"\b(docs/[\w./-]+\.md)#([\w-]+)", text)
    ]
    if path.endswith(".md"):
        here = (ROOT / path).parent
        for name, tag in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([\w-]+))?\)", without_code(text)):
            links.append((here / name if name else ROOT / path, tag))
    for target, tag in links:
        assert target.exists(), f"{path} links to {target}"
        assert not tag or tag in headings(target), f"{path} links to {target.name}#{tag}"


def test_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', read("pyproject.toml"), flags=re.M)
    assert f"## [{version}]" in read("CHANGELOG.md")
    assert f"\nversion: {version}\n" in read("CITATION.cff")


def test_uninitialised_memory_is_poisoned() -> None:
    zeros = torch.zeros(3)
    for tensor in (torch.empty(3), torch.empty_like(zeros), zeros.new_empty(3)):
        assert tensor.isnan().all()
    assert (torch.empty(3, dtype=torch.int64) < 0).all()
