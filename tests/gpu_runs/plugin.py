"""pytest's options --part, --ledger and --commit, and the kernels that each GPU test launches."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_runs.kernels import launched_kernels
from tests.gpu_runs.ledger import DEFAULT, Ledger
from tests.gpu_runs.parts import cut, parse_part, read_seconds, seconds_of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests on a GPU")
    group.addoption("--part", metavar="K/N", help="run the K-th of N parts of the chosen tests")
    text = f"the file to which GPU tests' outcomes are appended ({DEFAULT})"
    group.addoption("--ledger", metavar="PATH", type=Path, help=text)
    text = "the commit that is tested, for the ledger: `git rev-parse HEAD` (default: ask git)"
    group.addoption("--commit", metavar="HASH", default="", help=text)


def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if options.part is not None:
        parse_part(options.part)
    if not hasattr(config, "workerinput"):
        path = options.ledger or config.rootpath / DEFAULT
        config.pluginmanager.register(Ledger(path, config.rootpath, options.commit))


# After -m and -k have chosen.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part is None:
        return
    measured = read_seconds()
    tests = [(item.nodeid, seconds_of(item, measured)) for item in items]
    chosen = cut(tests, *parse_part(config.option.part))
    others = [item for index, item in enumerate(items) if index not in chosen]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for index, item in enumerate(items) if index in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with launched_kernels() as names:
        result = yield
    item.user_properties.append(("kernels", sorted(names)))
    return result
