"""Disks that are full or read-only: one message, an exit code other than 0, no file is damaged.

tests/train/test_faults.py has jobs in which the disk of one rank is full.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cce_dist.__main__ import main
from cce_dist.testing.forks import fork_context
from cce_dist.train import disk
from cce_dist.train.checkpoint import checkpoint_bytes, newest_checkpoint
from cce_dist.train.checkpoint_files import read_state, read_tensors, write_state
from cce_dist.train.config.load import load_config
from cce_dist.train.config.schema import DataConfig
from cce_dist.train.data.tokens import encode_texts, prepare_tokens
from cce_dist.train.disk import require_space, writing
from cce_dist.train.errors import ConfigError, JobError
from cce_dist.train.metrics import append_metrics, read_metrics, truncate_metrics
from cce_dist.train.progress import StepRecord
from cce_dist.train.watch import watch
from tests.support.torchrun import (
    read_losses,
    run_command,
    run_forked,
    run_forked_training,
    write_config,
)

pytestmark = pytest.mark.timeout(180)

FULL = Path("/dev/full")
# sysfs takes no folder, not even of root.
NEVER = Path("/sys/cce_dist")
# Path's methods raise for this name, as they do in a folder that others may not search.
LONG = 300 * "x"
# 1.4 times a checkpoint: one fits, and the next does not.
DISK_BYTES = 2**19


def only_message(output: str) -> str:
    """Returns the only error message; there must be no traceback."""
    assert "Traceback" not in output, output
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return message


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk with options of mount(8); a second call changes the options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def set_options(options: str) -> Path:
        again = "remount," if os.path.ismount(folder) else ""
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        return folder

    yield set_options
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_in_own_folder(arguments: Sequence[str]) -> None:
    folder = Path(arguments[1]).parent / f"host{os.environ['RANK']}"
    folder.mkdir()
    os.chdir(folder)
    watch.REPORT_S = 0.5
    sys.argv[1:] = arguments
    main()


def test_train_refuses_a_run_out_of_each_host(tmp_path: Path) -> None:
    """No checkpoint would be whole; the tokens are there on every host, as after earlier runs."""
    config = write_config(tmp_path, run={"out": "runs"})
    arguments = ("train", str(config), "--parallel.tp", "2", "--parallel.timeout_s", "4")
    code, output = run_forked(2, tmp_path / "out", *arguments, run=run_in_own_folder)
    assert code == 2
    assert "run.out must be a folder that every rank sees, but rank 1" in only_message(output)
    assert not (tmp_path / "host1" / "runs").exists()


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Limits the size of this process's files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_ranks", [0, 2], ids=["one process", "two ranks"])
def test_train_checkpoint_on_a_full_disk(
    tmp_path: Path, mount: Callable[[str], Path], num_ranks: int
) -> None:
    out = mount(f"size={DISK_BYTES}")
    config = write_config(
        tmp_path,
        run={"out": str(out)},
        parallel={"tp": num_ranks or 1},
        checkpoint={"keep": 9},
    )
    code, output = run_forked_training(num_ranks, config)
    assert code == 1, output
    message = only_message(output)
    folder = out / "run" / "checkpoints"
    assert message.startswith("error: the checkpoint of step ")
    assert f"could not be written in {folder}: No space left on device (rank " in message
    assert message.endswith("checkpoint.keep=9 of them stay on the disk")
    newest = newest_checkpoint(folder)
    assert newest is not None and [path.name for path in folder.iterdir()] == [newest.folder.name]
    mount("size=16m")
    code, output = run_forked_training(num_ranks, config, "--resume")
    assert code == 0 and f"after step {newest.step}" in output, output
    assert len(read_losses(out / "run")) == 6


def test_train_refuses_run_out_before_the_vocabulary(
    tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    (tmp_path / "file").touch()
    for out in (NEVER, tmp_path / "file", tmp_path / LONG):
        config = write_config(tmp_path, run={"out": str(out)})
        for arguments in ((), ("--resume",)):
            code, output = run_forked_training(0, config, *arguments)
            message = f"error: run.out must be in a folder that can be written, got {out}"
            assert code == 2 and only_message(output).startswith(message)
            assert "byte-level BPE" not in output
    # The messages from here on need a disk.
    out = mount("size=128k")
    config = write_config(tmp_path, run={"out": str(out)})
    (out / "run").mkdir()
    code, output = run_forked_training(0, config)
    size = disk.format_bytes(checkpoint_bytes(load_config(config)))
    message = f"run.out must be in a folder with {size} of free space for a checkpoint, got 12"
    assert code == 2 and message in only_message(output)
    mount("size=16m,ro")
    for arguments in ((), ("--resume",)):
        code, output = run_forked_training(0, config, *arguments)
        assert code == 2 and "can be written, got" in only_message(output)
        assert "Read-only file system" in output and "byte-level BPE" not in output
    assert [path.name for path in out.iterdir()] == ["run"], "nothing has been moved"


def test_require_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_space(tmp_path / "new" / "folders", "run.out", 1)
    assert list((tmp_path / "new" / "folders").iterdir()) == []
    with small_files(disk.PROBE_BYTES - 1), pytest.raises(ConfigError, match="File too large"):
        require_space(tmp_path, "run.out", 1)
    with pytest.raises(ConfigError, match=r"with 1024\.00 PiB|free space for a checkpoint, got"):
        require_space(tmp_path, "run.out", 2**60)
    # A file system with an unknown size counts as large enough.
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: (_ for _ in ()).throw(OSError()))
    require_space(tmp_path, "run.out", 2**60)


def test_checkpoint_bytes_is_about_right(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint={"every": 0})
    code, output = run_forked_training(0, config)
    assert code == 0, output
    newest = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    # torch adds about 1 KiB to each of some 40 tensors.
    sizes = json.loads((newest.folder / "run.json").read_text())["files"].values()
    rest = sum(sizes) - checkpoint_bytes(load_config(config))
    assert 0 < rest < 2**17


def test_train_leaves_folders_that_somebody_keeps(tmp_path: Path) -> None:
    """Only checkpoints of the run count for checkpoint.keep, and only these are removed."""
    config = write_config(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    others = ["step_00000001.best", "step_last", "step_00000002-copy"]
    for name in others:
        (checkpoints / name).mkdir(parents=True)
    every = ("--resume", "--checkpoint.every", "1", "--checkpoint.keep", "1")
    code, output = run_forked_training(0, config, *every)
    assert code == 0, output
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == sorted([*others, "step_00000006"])


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    record = StepRecord(1, 2.0, 3.0, 4, 5.0, 6.0)
    append_metrics(tmp_path, record)
    (tmp_path / "metrics.jsonl.partial").symlink_to(FULL)
    with pytest.raises(JobError, match=r"metrics\.jsonl could not be written in .*: No space left"):
        truncate_metrics(tmp_path, 1)
    assert read_metrics(tmp_path) == [
        {
            "step": 1,
            "loss": 2.0,
            "tokens_per_s": 3.0,
            "peak_memory": 4,
            "lr": 5.0,
            "grad_norm": 6.0,
        }
    ]
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    with pytest.raises(JobError, match=r"No space left .* are free there\. To do: .*--resume"):
        append_metrics(tmp_path, record)


@pytest.mark.parametrize("name", ["report.md", "loss.png"])
def test_train_report_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    config = write_config(tmp_path, steps=2)
    code, output = run_forked_training(0, config)
    assert code == 0, output
    path = tmp_path / "run" / name
    path.unlink()
    path.symlink_to(FULL)
    code, output = run_forked_training(0, config, "--resume")
    assert code == 1
    assert "error: the report could not be written in " in only_message(output)
    path.unlink()
    code, output = run_forked_training(0, config, "--resume")
    assert code == 0 and path.exists(), output


@pytest.mark.parametrize("cache", [NEVER, Path(LONG)], ids=["never", "long"])
def test_prepare_tokens_refuses_a_cache_that_cannot_be_written(cache: Path) -> None:
    said: list[str] = []
    config = DataConfig(paths=(Path(argparse.__file__),), vocab_size=300, cache=cache)
    with pytest.raises(ConfigError, match=r"data\.cache must be in a folder that can be written"):
        prepare_tokens(config, said.append, key="0")
    assert not said, "before the vocabulary is trained"


def test_prepare_tokens_on_a_disk_that_gets_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PROBE_BYTES", 1)
    paths = (Path(argparse.__file__),)
    config = DataConfig(paths=paths, vocab_size=300, cache=tmp_path)
    message = r"the token ids could not be written in .*set data\.cache to another folder"
    for num_bytes in (2**10, 2**15):
        # First the tokenizer is too large, then the ids, for which NumPy raises without an errno.
        with small_files(num_bytes), pytest.raises(JobError, match=message):
            prepare_tokens(config, lambda text: None)
        assert list(tmp_path.iterdir()) == [], "a part would fill the disk for ever"


@pytest.mark.parametrize(
    ("name", "content"),
    [("info.json", "{"), ("tokenizer.json", "{"), ("tokens.npy", "x"), ("tokens.npy", None)],
)
def test_a_damaged_cache_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    paths = (Path(argparse.__file__),)
    config = DataConfig(paths=paths, vocab_size=300, cache=tmp_path)
    cache = prepare_tokens(config, lambda text: None)
    file = cache.folder / name
    file.unlink()
    if content is not None:
        file.write_text(content)
    message = rf"data\.cache must have tokens as they were written in {cache.folder}, got .*remove"
    with pytest.raises(ConfigError, match=message):
        encode_texts(prepare_tokens(config, lambda text: None), ["a"])
        cache.tokens()


def test_a_disk_that_fails_is_not_the_caches_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    config = DataConfig(paths=(Path(argparse.__file__),), vocab_size=300, cache=tmp_path)
    cache = prepare_tokens(config, lambda text: None)
    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(OSError, match="Input/output error"):
        cache.tokens()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    # A checkpoint that somebody keeps under another name is none of the run's.
    for name in ("step_backup", "step_00000007.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{")
    assert newest_checkpoint(tmp_path) is None
    folder = tmp_path / "step_00000006"
    folder.mkdir()
    for content in (None, "{", "[]", '{"step": 6}'):
        # Without the file, an earlier checkpoint must not be taken in silence.
        if content is not None:
            (folder / "run.json").write_text(content)
        with pytest.raises(ConfigError, match=f"checkpoint {folder} must have a run.json as it"):
            newest_checkpoint(tmp_path)


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    for line in (b"garbage", b"5", b"{}", b'{"step": "6"}', b'{"\xff": 6}'):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"st')
        with pytest.raises(ConfigError, match=r"metrics\.jsonl must have a JSON object .* line 2"):
            read_metrics(tmp_path)


def run_on_full_output(config: Path) -> None:
    run_command({}, FULL, ("train", str(config)))


def test_train_whose_output_is_on_a_full_disk(tmp_path: Path) -> None:
    """Nothing can be printed; the job must end all the same, and not with code 0."""
    process: Any = fork_context().Process(target=run_on_full_output, args=(write_config(tmp_path),))
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 1


def test_writing_gives_the_reason_of_any_error(tmp_path: Path) -> None:
    message = r"x could not be written in .*: 8 requested and 0 written; .* are free there"
    with pytest.raises(JobError, match=message), writing("x", tmp_path):
        raise OSError("8 requested and 0 written")
    with pytest.raises(ValueError, match="no file"), writing("x", tmp_path):
        raise ValueError("no file")


# torch says that there is one process.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torchs_checkpoint_errors_are_one_line(tmp_path: Path) -> None:
    state = {"a": torch.arange(9000.0), "rng": torch.get_rng_state()}
    with small_files(2**13), pytest.raises(OSError, match=r"^File too large \(rank 0\)$"):
        write_state(state, tmp_path / "full")
    with pytest.raises(JobError, match=r"torch could not write .*rank 0\)$") as caught:
        write_state({**state, "function": lambda: None}, tmp_path / "unpicklable")
    assert "pickle" in str(caught.value) and "\n" not in str(caught.value)
    folder = tmp_path / "whole"
    write_state(state, folder)
    assert set(read_tensors(folder)) == {"a", "rng"}
    read = {"a": torch.zeros(9000), "rng": torch.zeros_like(state["rng"])}
    read_state(read, folder)
    assert np.array_equal(read["a"], state["a"])
    (file,) = folder.glob("*.distcp")
    # The file keeps its size.
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(JobError, match=r"checkpoint .*whole could not be read: .*remove") as caught:
        read_state(read, folder)
    assert "\n" not in str(caught.value)
    (folder / ".metadata").write_bytes(b"spoilt")
    with pytest.raises(JobError, match=r"checkpoint .*whole could not be read: .*remove"):
        read_tensors(folder)
