"""What an installed cce-dist can do, found out in its own environment: tests/test_install.py.

    python -I install_probe.py FOUND QUESTION ...

QUESTION is a JSON list of one of these:

    ["modules", NUMBER, SITE, ...]  imports, of the first NUMBER helps, and what the patch says of
                                    Megatron
    ["commands", ANSWERS, ONLY, CHECKOUT, ONLY, CHECKOUT, ...]  subcommands' exit codes and output
    ["code", CODE, ...]             the same of each of these lines of Python

FOUND is the JSON file to write, with a list of the answers. Each SITE is an environment's
site-packages, which takes the place of this Python's own. Subcommands whose words the pattern
before matches are those of the package in the folder CHECKOUT; of the installed one where that is
"".
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("cce_dist", "megatron_patch")
# Of the third-party packages those that every environment has, with the same files.
COMMON = ("click", "numpy", "rich", "torch", "typer")
CHECK = "from megatron_patch.__main__ import main; raise SystemExit(main(['--check']))"


def main(path: str, *questions: str) -> None:
    # What forks would each import, for 2.5 s; torch's optimizers import the second.
    for name in ("torch", "torch._dynamo"):
        importlib.import_module(name)
    found = [of_fork(functools.partial(answer, *json.loads(each))) for each in questions]
    Path(path).write_text(json.dumps(found))


def answer(what: str, *asked: Any) -> Any:
    if what == "modules":
        number, *sites = asked
        return find_in_each(sites, number)
    if what == "code":
        return [run_forked(functools.partial(run_code, code)) for code in asked]
    answers, *rest = asked
    found = {}
    for only, checkout in zip(rest[::2], rest[1::2], strict=True):
        found |= of_fork(functools.partial(run_commands, answers, only, checkout))
    return found


def of_fork(function: Callable[[], Any]) -> Any:
    """What it returns in a fork of this process, by JSON."""
    with tempfile.NamedTemporaryFile("r") as file:
        child = os.fork()
        if not child:
            # What a child raises must not go on as its parent.
            try:
                Path(file.name).write_text(json.dumps(function()))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{function}: {status}"
        return json.load(file)


def subcommands() -> Iterator[tuple[list[str], Any]]:
    """Words and command of each, groups too; typer's own tree, so that a new one is here. Of a
    command that a checkout alone has it is found there, or stands in for it."""
    import typer.main
    import typer.rich_utils

    from cce_dist.cli.main import app

    # Otherwise the command of each fork would import and make them again, for 0.2 s.
    typer.main.get_command = functools.cache(typer.main.get_command)
    group: Any = typer.main.get_command(app)
    waiting: list[tuple[list[str], Any]] = [([], group)]
    while waiting:
        words, command = waiting.pop(0)
        yield words, command
        for name in getattr(command, "commands", {}):
            context = command.make_context("", [name], resilient_parsing=True)
            _, child, _ = command.resolve_command(context, [name])
            waiting.append(([*words, name], child))


def find_in_each(sites: list[str], num_helped: int) -> list[dict[str, Any]]:
    """What find_modules finds in each of these environments, by a fork: of what they have in common
    all that the first one imports is imported once. The first `num_helped` are asked for helps."""
    place = sys.path.index(sysconfig.get_path("purelib"))
    # The sources are the same in each.
    for package in PACKAGES:
        for file in Path(sites[0], package).rglob("*.py"):
            named_in(file.read_text(encoding="utf-8"))
    found = []
    for site in sites:
        helps = len(found) < num_helped
        found.append(of_fork(functools.partial(find_modules, place, site, helps=helps)))
        for name in found[0]["common"] if len(found) == 1 else ():
            importlib.import_module(name)
    return found


def find_modules(place: int, site: str, *, helps: bool) -> dict[str, Any]:
    """Modules that cannot be imported, third-party ones that are named anywhere, and all helps:
    with `site` at that place of the path."""
    sys.path[place] = site
    failures, third_party, texts = {}, {}, {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for info in pkgutil.walk_packages(spec.submodule_search_locations, f"{package}."):
            if info.name.endswith(".__main__"):
                continue
            try:
                module = importlib.import_module(info.name)
            except Exception as error:
                failures[info.name] = getattr(error, "name", None) or repr(error)
                continue
            for name in named_in(Path(str(module.__file__)).read_text(encoding="utf-8")):
                third_party[name] = importlib.util.find_spec(name) is not None
    for words, _ in subcommands() if helps else ():
        texts[" ".join(words)] = run_forked(functools.partial(run, [*words, "--help"]))
    common = [name for name in sys.modules if name.partition(".")[0] in COMMON]
    origin = str(importlib.import_module(PACKAGES[0]).__file__)
    return {
        "failures": failures,
        "third_party": third_party,
        "helps": texts,
        "patch": run_forked(functools.partial(run_code, CHECK)),
        "common": common,
        "origin": origin,
    }


@functools.cache
def named_in(source: str) -> set[str]:
    """Third-party packages that its import statements name, in functions too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    known = {*PACKAGES, *sys.stdlib_module_names}
    return {top for name in names if (top := name.partition(".")[0]) not in known}


def run_commands(answers: dict[str, str], only: str, checkout: str) -> dict[str, tuple[int, str]]:
    """Runs those whose words the pattern `only` matches, with what `answers` has for their
    parameters, each in a fork."""
    if checkout:
        sys.path.insert(0, checkout)
    found = {}
    for words, command in subcommands():
        name = " ".join(words)
        if not hasattr(command, "commands") and re.fullmatch(only, name):
            given = [*words, *arguments_of(command, answers)]
            found[name] = run_forked(functools.partial(run, given))
    return found


def arguments_of(command: Any, answers: dict[str, str]) -> list[str]:
    """Of a flag the answer is ""."""
    given: list[str] = []
    for parameter in command.params:
        for name in [*parameter.opts, *parameter.secondary_opts]:
            if name in answers:
                given += [name] if name.startswith("-") else []
                given += [answers[name]] if answers[name] else []
    return given


def run_forked(function: Callable[[], int]) -> tuple[int, str]:
    """Exit code, which it returns, and all output."""
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            os._exit(function())
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return os.waitstatus_to_exitcode(status), file.read()


def run(arguments: list[str]) -> int:
    return run_code("from cce_dist.__main__ import main; main()", arguments)


def run_code(text: str, arguments: Sequence[str] = ()) -> int:
    sys.argv[1:] = arguments
    code = 1
    try:
        exec(text, {})
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main(*sys.argv[1:])
