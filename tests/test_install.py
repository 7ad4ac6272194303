"""The wheel, installed with each extra into an environment that has nothing else."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import cce_dist
from cce_dist.cli.main import app
from cce_dist.needs.checkout import EXPERIMENTS, REPORT
from cce_dist.needs.extras import CORE, EXTRAS, explain_missing, need_modules
from tests.installs import NAME, build, install, make_environment, metadata_of, run
from tests.launch.launch_jobs import write_config

# Environments are made, and torch is imported in each.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parent.parent
PROBE = Path(__file__).parent / "install_probe.py"
# All but `test`, whose environment is the one that runs this.
CHOICES = (CORE, "train", "bench", "mpi", "megatron", "tensorboard")
# The environments that are looked into. "bench" is in that of "train". Two extras that bring one
# package each are together: no module imports both.
ENVIRONMENTS = (CORE, "train", "megatron", "mpi,tensorboard")
# Where each help is read: the others have packages more than CORE, which no help imports.
HELPED = ENVIRONMENTS[:1]
# Frameworks, of which an environment of its own would hold nothing to import: tests/integrations.
FRAMEWORKS = ("torchtitan", "transformers", "trl")
# Extras that bring what another brings.
BRINGS = {"bench": "train"}
# Without Triton, which torch's CUDA build brings, and without what extras bring.
OPTIONAL = r"cce_dist\.(backends\.(triton|empty_shard)|ahead|integrations|train|bench|testing)\b.*"
# Subcommands that train, or read what training has written.
TRAINING = ("train", "eval", "bench train")
# Those that no installed package has.
IN_CHECKOUT = {*REPORT, *(f"bench {name}" for name in EXPERIMENTS)}
COMPLETION = {
    "_CCE_DIST_COMPLETE": "complete_bash",
    "COMP_WORDS": "cce-dist bench los",
    "COMP_CWORD": "2",
}
PLAIN = {
    "--device": "cpu",
    "--dtype": "float32",
    "--backend": "torch",
    "--arch": "sm_90",
    "--shape": "64x600x16",
    "--vocab": "600",
    "--dim": "16",
    "--tokens": "64",
    "--repeats": "3",
    "--method": "exact",
    "--gradient": "exact",
    "--peers": "none",
    "--seconds": "0",
    "name": "gemma2-2b",
}

Environments = Callable[[str], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def environments(
    built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Environments:
    """Of an extra its environment's Python."""
    made: dict[str, Path] = {}

    def environment(extra: str) -> Path:
        if extra in BRINGS:
            # The same packages, as test_extras_are_those_that_messages_name requires.
            made[extra] = environment(BRINGS[extra])
            install(made[extra], built[1], extra)
        elif extra not in made:
            folder = tmp_path_factory.mktemp(extra or "plain")
            made[extra] = make_environment(folder, built[1], extra)
        return made[extra]

    return environment


def missing_by_right(extra: str) -> set[str]:
    """Modules that an installation with `extra` need not have."""
    brought = {CORE, *extra.split(",")}
    return {"triton", *(name for name, of in EXTRAS.items() if of not in brought)}


@dataclass(frozen=True)
class Found:
    """Answers of the environment without extras, by one process: torch takes 3 s to import."""

    sites: list[str]
    modules: list[dict[str, Any]]  # of each environment
    commands: dict[str, tuple[int, str]]
    calls: list[tuple[int, str]]


@pytest.fixture(scope="module")
def found(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder, python = tmp_path_factory.mktemp("asked"), environments(CORE)
    sites = [site_of(environments(extra)) for extra in ENVIRONMENTS]
    modules = ["modules", len(HELPED), *sites]
    subcommands = ask_subcommands(folder, {".*": ""})
    return Found(sites, *probe(python, folder, modules, subcommands, ["code", *calls_of(python)]))


def test_an_extra_brings_what_its_modules_import(environments: Environments, found: Found) -> None:
    sites = found.sites
    assert {CORE, *BRINGS, *",".join(ENVIRONMENTS).split(",")} == set(CHOICES)
    for extra, other in BRINGS.items():
        assert site_of(environments(extra)) == sites[ENVIRONMENTS.index(other)]
    for extra, site, modules in zip(ENVIRONMENTS, sites, found.modules, strict=True):
        assert modules["origin"].startswith(site)
        require_whole(extra, modules)
        require_megatron(extra, *modules["patch"])
        if extra in HELPED:
            require_helps(modules["helps"])


def site_of(python: Path) -> str:
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    return str(site)


def require_whole(extra: str, found: dict[str, Any]) -> None:
    may_miss = missing_by_right(extra)
    failed = {
        module: why
        for module, why in found["failures"].items()
        if why not in may_miss or not re.fullmatch(OPTIONAL, module)
    }
    assert failed == {}, extra
    # Named in functions too: those imports come late.
    absent = {name for name, is_there in found["third_party"].items() if not is_there}
    assert absent <= may_miss, extra
    assert set(found["third_party"]) <= {"triton", *EXTRAS}


def require_megatron(extra: str, code: int, said: str) -> None:
    if extra == "megatron":
        # Megatron warns before.
        assert code == 0 and said.splitlines()[-1].startswith(f"megatron_patch: {NAME} "), said
    else:
        assert code == 1
        assert re.fullmatch(r"megatron_patch: cannot run: .*install megatron-core.*\n", said), said


def require_helps(helps: dict[str, Any]) -> None:
    assert {"", "train", "doctor", "bench loss", "plan model"} <= set(helps)
    assert {words for words, (code, _) in helps.items() if code} == IN_CHECKOUT
    for words in IN_CHECKOUT:
        assert helps[words] == [2, in_checkout(words)]
        group, _, name = words.rpartition(" ")
        assert f" {name} " in helps[group][1]


def in_checkout(words: str) -> str:
    return (
        f"error: `cce-dist {words}` is in the repository and in its source archive alone: start "
        f"`python -m cce_dist {words}` in the folder of one of them\n"
    )


def ask_subcommands(folder: Path, asked: dict[str, str], **more: str) -> list[Any]:
    """The question for exit code and output of subcommands, in moments of work.

    Args:
        asked: of a pattern that their words match the folder with the package, "" for the
            installed one.
    """
    config = write_config(folder, steps=2, batch=2)
    cache, text = str(folder / "cache"), Path(argparse.__file__)
    short = folder / "short.txt"
    short.write_text(text.read_text()[:2000])
    answers = {**PLAIN, "config": str(config), "run": str(folder / "runs" / "tiny")}
    answers |= {"texts": str(short), "--cache": cache, "--data": str(text)}
    answers |= {"path": str(folder / "none.json"), **more}
    words = [word for each in asked.items() for word in each]
    return ["commands", answers, *words]


def probe(python: Path, folder: Path, *questions: list[Any]) -> list[Any]:
    path = folder / "found.json"
    run([str(python), "-I", str(PROBE), str(path), *map(json.dumps, questions)], cwd=folder)
    return json.loads(path.read_text())


def test_the_plain_install_works_or_names_the_extra(found: Found) -> None:
    for words, (code, output) in found.commands.items():
        if words in IN_CHECKOUT:
            assert (code, output) == (2, in_checkout(words))
            continue
        assert code in (0, 2), f"{words}: {output}"
        assert "Traceback" not in output, f"{words}: {output}"
        extra = "bench" if words.startswith("bench") else "train"
        says = (
            rf"error: `cce-dist {words}` needs \w+, which is not installed: "
            rf"pip install 'cce-dist\[{extra}\]'\n"
        )
        assert (re.fullmatch(says, output) is not None) == (words in TRAINING), output
    works = {words for words, (code, _) in found.commands.items() if code == 0}
    assert {"doctor", "plan model", "plan models", "bench loss", "bench ranks"} <= works


def test_an_extra_is_enough_to_train(
    built: tuple[Path, Path], environments: Environments, tmp_path: Path
) -> None:
    sizes = {"--steps": "2", "--checkpoint-steps": "2", "--evaluations": "1", "--seeds": "1"}
    small = {"--layers": "1", "--batch": "2", "--sequence-length": "16", "--megabytes": "0.05"}
    short = {"--start": "random", "--held-out-tokens": "64", "--warmup": "1"}
    timed = {"--warmup-steps": "1", "--timed-steps": "1", "--no-largest": ""}
    source = built[0].parent / built[0].name.removesuffix(".tar.gz")
    records = {"--records": str(source / "docs/notebook/data/evidence")}
    installed, checkout = "train|eval|bench train", "bench (capture|converge|first-call)|report"
    # The extra `bench` brings no more than `train`, so that the environment is the same.
    python = environments("bench")
    asked = {installed: "", checkout: str(source)}
    answers = {**sizes, **small, **short, **timed, **records}
    (found,) = probe(python, tmp_path, ask_subcommands(tmp_path, asked, **answers))
    assert [bool(re.fullmatch(installed, words)) for words in found].count(True) == 3
    assert len(found) == 7
    for words, (code, output) in found.items():
        assert code == 0, f"{words}: {output}"


def calls_of(python: Path) -> list[str]:
    """Calls of the commands, in forks of one process."""

    def start(how: str, *arguments: str) -> str:
        given = ["cce-dist", *arguments]
        return f"import runpy, sys; sys.argv[:] = {given}; runpy.{how}, run_name='__main__')"

    script, module = f"run_path({str(python.parent / 'cce-dist')!r}", "run_module('cce_dist'"
    return [
        start(script, "--version"),
        start(module, "--version"),
        "import cce_dist, sys; print(cce_dist.__version__, 'typer' in sys.modules)",
        start(script, "plan", "model", "GPT2", "--plot", "x.png"),
        "from megatron_patch.__main__ import main; main(['--help'])",
        f"import os; os.environ.update({COMPLETION}); {start(script)}",
    ]


def test_the_command(built: tuple[Path, Path], found: Found) -> None:
    version = metadata_of(built[1])["Version"]
    *answers, plot, patch, _ = found.calls
    said = f"{NAME} {version}\n"
    assert answers == [[0, said], [0, said], [0, f"{version} False\n"]]
    assert plot[0] == 2 and "`cce-dist plan model` needs matplotlib" in plot[1]
    assert patch[0] == 0 and "SCRIPT" in patch[1]


def test_a_checkout_on_the_path_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    for name in ("distribution", "version"):
        monkeypatch.setattr(importlib.metadata, name, absent)
    assert not hasattr(cce_dist, "__version__")
    with pytest.raises(AttributeError, match=re.escape(f"not installed: pip install {ROOT}")):
        cce_dist.__version__  # noqa: B018
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 2 and "cce-dist is not installed" in done.output
    error = ModuleNotFoundError("No module named 'typer'", name="typer.core")
    said = explain_missing(error, ["--help"])
    assert said == f"`cce-dist` needs typer, which is not installed: pip install '{ROOT}'"
    error = ModuleNotFoundError("No module named 'yaml'", name="yaml")
    assert str(explain_missing(error, ["eval", "runs/x"])).endswith(f"pip install '{ROOT}[train]'")
    assert explain_missing(ModuleNotFoundError("mine", name="mine"), ["train"]) is None


def test_a_module_that_is_there_but_broken_is_not_called_missing() -> None:
    error = ModuleNotFoundError("No module named 'numpy.gone'", name="numpy.gone")
    assert explain_missing(error, ["train"]) is None
    with pytest.raises(ModuleNotFoundError, match="'no_such_module'"):
        need_modules("numpy", "no_such_module")


def test_shell_completion(environments: Environments, found: Found, tmp_path: Path) -> None:
    command = environments(CORE).parent / "cce-dist"
    # Its shell is found among the processes that have started it.
    run(["bash", "-c", f"HOME={tmp_path} {command} --install-completion && true"])
    assert found.calls[-1] == [0, "loss\n"]
    assert "cce-dist" in (tmp_path / ".bashrc").read_text()


def test_extras_are_those_that_messages_name(built: tuple[Path, Path]) -> None:
    metadata = metadata_of(built[1])
    assert set(metadata.get_all("Provides-Extra") or ()) == {*CHOICES, *FRAMEWORKS, "test"} - {CORE}
    required: dict[str, set[str]] = {extra: set() for extra in (*CHOICES, *FRAMEWORKS)}
    for text in metadata.get_all("Requires-Dist") or ():
        requirement = Requirement(text)
        for extra in required:
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required[extra].add(canonicalize_name(requirement.name))
    packages = importlib.metadata.packages_distributions()
    for module, extra in EXTRAS.items():
        named = {canonicalize_name(name) for name in packages[module]}
        # By itself: what another package happens to bring may be gone with its next release.
        assert named & required[extra], f"{module} is not among [{extra}]"
    for extra, other in BRINGS.items():
        assert required[extra] == required[other]


def test_metadata(built: tuple[Path, Path]) -> None:
    metadata: Any = metadata_of(built[1])
    assert metadata["License-Expression"] == "Apache-2.0"
    versions = re.findall(r"Python :: (3\.\d+)$", "\n".join(metadata.get_all("Classifier")), re.M)
    assert versions and all(SpecifierSet(metadata["Requires-Python"]).contains(v) for v in versions)
    for url in metadata.get_all("Project-URL"):
        assert re.fullmatch(r"[\w -]+, https://\S+", url)
    # A package index has README's text alone: no link may lead to a file or a heading.
    description = metadata.get_payload()
    assert (
        "](https://" in description
        and "Limits [docs/guide/limits.md] has every limit" in description
    )
    assert "![" not in description and "peers.svg" not in description
    assert re.findall(r"\]\((?!https?://)[^)]*\)", re.sub(r"`[^`]*`", "", description)) == []


def test_the_source_archive_is_whole(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        found = {name.partition("/")[2]: entry for name, entry in _entries(archive)}
    folders = ("cce_dist", "megatron_patch", "benchmarks", "launch", "docs", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    paths += [*ROOT.glob("*.md"), ROOT / "CITATION.cff", ROOT / "LICENSE"]
    for path in paths:
        if path.is_file() and not {"__pycache__", "runs"} & set(path.parts):
            name = path.relative_to(ROOT).as_posix()
            assert name in found, name
            assert bool(found[name].mode & 0o100) == bool(path.stat().st_mode & 0o100), name
    assert not any(name.startswith((".venv", ".ci", "runs/")) for name in found)


def _entries(archive: tarfile.TarFile) -> list[tuple[str, tarfile.TarInfo]]:
    return [(entry.name, entry) for entry in archive.getmembers()]
