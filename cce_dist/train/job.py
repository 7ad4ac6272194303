"""`cce-dist train` from its arguments to its exit code."""

from __future__ import annotations

import gc
import importlib
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cce_dist.train.config.load import load_config
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.batches import split_tokens
from cce_dist.train.data.tokens import TokenCache, open_tokens, prepare_tokens
from cce_dist.train.model.decoder import count_parameters
from cce_dist.train.report.run import describe_ranks, evaluate, write_report
from cce_dist.train.watch.heartbeat import Heartbeat
from cce_dist.train.watch.watch import run_watched, wait_for_main

from .checkpoint import check_resumable, checkpoint_bytes, newest_checkpoint, remove_partial
from .disk import LOCK, held, reason_of, require_space, writing
from .errors import ConfigError
from .loop import Job, Run, resume_run, start_run, train
from .metrics import append_events, open_events
from .progress import Display
from .ranks import Ranks, num_ranks
from .stop import StopRequest


def run_job(
    config_path: Path, overrides: Sequence[tuple[str, str]], *, resume: bool, compare_dense: bool
) -> int:
    """Trains, reports, and returns the exit code; errors become one message on stderr.

    A launcher that restarts the ranks after a failure gives them the same command. Restarted ranks
    continue the run, whatever `resume` is.
    """
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with ExitStack() as locks:
        options = {"locks": locks, "resume": resume, "compare_dense": compare_dense}
        work = partial(_train_and_report, **options)
        return run_watched(partial(_load, config_path, overrides), work, _kin)


def _load(config_path: Path, overrides: Sequence[tuple[str, str]]) -> TrainConfig:
    config = load_config(config_path, overrides, num_ranks=num_ranks())
    if config.log == "tensorboard":
        # Missing, it ends all ranks before they join; `cce_dist.__main__` names its extra.
        importlib.import_module("tensorboard")
    return config


def _kin(config: TrainConfig, ranks: Ranks) -> int:
    # Only the last stage's ranks merge statistics, unless the head is over the whole pipeline.
    return 0 if config.layout().over_pipeline else ranks.pp_rank


def _train_and_report(
    config: TrainConfig,
    ranks: Ranks,
    heartbeat: Heartbeat,
    stop: StopRequest,
    *,
    locks: ExitStack,
    resume: bool,
    compare_dense: bool,
) -> None:
    display = Display(ranks.is_main)
    heartbeat.place.phase = "preparing the text"
    with ExitStack() as refused:
        cache = _share_tokens(config, ranks, display, resume, locks, refused)
        batches = split_tokens(cache.tokens(), config, ranks.dp)
        refused.pop_all()
    if cache.num_merged < config.data.vocab_size:
        display.warn(
            f"the text gives {cache.num_merged} tokens of data.vocab_size="
            f"{config.data.vocab_size}: the ids above stay unused; more text (data.megabytes) "
            "or a smaller vocabulary would fill it"
        )
    job = Job(config, ranks, batches, cache.key, display, heartbeat, stop)
    run = _trained(job, config.run_dir, "cce", resume)
    if run is None:
        return
    evaluation = evaluate(job, run)
    if run.events is not None:
        append_events(run.events, config.steps, {"held_out_loss": evaluation.loss})
    dense = None
    if compare_dense:
        # The second run's peak must not include memory of the first run.
        if run.pipeline is not None:
            run.pipeline.close()
        del run
        gc.collect()
        dense = config.run_dir / "dense"
        if _trained(job, dense, "dense", resume) is None:
            return
    heartbeat.place.phase = "writing the report"
    if ranks.is_main:
        report = write_report(job, config.run_dir, evaluation, dense)
        display.show_report(report)
        display.say(f"written: {config.run_dir}/report.md, loss.png, metrics.jsonl, checkpoints/")


def _trained(job: Job, folder: Path, head: str, resume: bool) -> Run | None:
    job.heartbeat.place.phase = "building the model"
    with writing("the folder of the run", folder):
        folder.mkdir(exist_ok=True)
    run = start_run(job, folder, head)
    start = resume_run(job, run) if resume else 0
    config, ranks, size = job.config, job.ranks, count_parameters(job.config)
    if config.log == "tensorboard" and ranks.is_main:
        run = replace(run, events=open_events(folder, start))
    tokens = ranks.dp * config.batch * config.data.sequence_length
    text = (
        f"{run.folder}: head {run.head}, {size.total / 1e6:.2f} M parameters "
        f"({size.vocabulary / 1e6:.2f} M in the vocabulary), {ranks.world_size} ranks on "
        f"{ranks.device.type}, {describe_ranks(job)}, {tokens} tokens a step"
    )
    if run.pipeline is not None:
        text += f"; pipeline: {run.pipeline.layout.describe()}"
    job.display.say(text)
    return run if train(job, run, start) else None


def _share_tokens(
    config: TrainConfig,
    ranks: Ranks,
    display: Display,
    resume: bool,
    locks: ExitStack,
    refused: ExitStack,
) -> TokenCache:
    """Prepares folder and text on the main rank; other ranks wait as long as that rank lives."""
    if ranks.is_main:
        _open_run(config, display, resume, locks, refused)
        mark = secrets.token_hex(8)
        with writing(LOCK, config.run_dir):
            (config.run_dir / LOCK).write_text(mark)
        ranks.store.set("folder", mark)
        cache = _prepare_tokens(config, ranks, display, resume)
        ranks.store.set("tokens", cache.key)
        return cache
    wait_for_main(ranks, "folder")
    _require_shared(config.run_dir / LOCK, ranks)
    require_space(config.run_dir, "run.out", 0)
    wait_for_main(ranks, "tokens")
    try:
        return open_tokens(config.data.cache, ranks.store.get("tokens").decode())
    except OSError as error:
        raise ConfigError(
            f"data.cache must be a folder that every rank sees, but rank {ranks.rank} cannot read "
            f"{error.filename}: {reason_of(error)}"
        ) from None


def _require_shared(path: Path, ranks: Ranks) -> None:
    """Checks that this rank reads what the main rank has written to a file of the run's folder.

    Elsewhere this rank's shares of checkpoints would be lost to the others: no checkpoint is whole.

    Raises:
        ConfigError: this rank has no such file, or another.
    """
    mark = ranks.store.get("folder").decode()
    # NFS may show a new file some seconds late; rank 0 waits for twice as long as this rank.
    until = time.monotonic() + ranks.timeout.total_seconds() / 2
    while not _reads(path, mark):
        if time.monotonic() > until:
            raise ConfigError(
                f"run.out must be a folder that every rank sees, but rank {ranks.rank} does not "
                f"see what rank 0 wrote to {path}: set run.out to a shared folder"
            )
        time.sleep(0.1)


def _reads(path: Path, mark: str) -> bool:
    # Without the file, or with another job's, the folder is another host's.
    with suppress(OSError, ValueError):
        return path.read_text() == mark
    return False


def _open_run(
    config: TrainConfig, display: Display, resume: bool, locks: ExitStack, refused: ExitStack
) -> None:
    """Makes the run's folder, or finds it, and checks that a checkpoint can be written there.

    Args:
        locks: hold the folder from then on.
        refused: closed, it takes a new folder away, and the earlier run has its name again.
    """
    num_bytes = checkpoint_bytes(config)
    # Unlike Path's method, os.path raises nothing for a folder that this user may not read.
    if resume and os.path.exists(config.run_dir):
        locks.enter_context(held(config.run_dir))
        checkpoints = config.run_dir / "checkpoints"
        with writing("the checkpoints", checkpoints):
            remove_partial(checkpoints)
        newest = newest_checkpoint(checkpoints)
        is_done = newest is not None and newest.step >= config.steps
        return require_space(config.run_dir, "run.out", 0 if is_done else num_bytes)
    # The check comes before an earlier run is moved: if it fails, that run can still be resumed.
    require_space(config.run.out, "run.out", num_bytes)
    earlier = move_aside(config.run_dir, display)
    refused.callback(_move_back, config.run_dir, earlier, display)
    with writing("the folder of the run", config.run.out):
        config.run_dir.mkdir(exist_ok=True)
    locks.enter_context(held(config.run_dir))


def _prepare_tokens(
    config: TrainConfig, ranks: Ranks, display: Display, resume: bool
) -> TokenCache:
    checkpoint = newest_checkpoint(config.run_dir / "checkpoints") if resume else None
    if checkpoint is None:
        return prepare_tokens(config.data, display.say)
    check_resumable(checkpoint, config, ranks.dp)
    key = checkpoint.data_key
    cache = prepare_tokens(config.data, display.say, key=key)
    if cache.key != key:
        raise ConfigError(
            f"--resume must find the text of {checkpoint.folder} (key {key}), got other text "
            f"(key {cache.key}): restore the files or {config.data.cache}/{key}, or start a new "
            "run with another run.name"
        )
    return cache


def move_aside(folder: Path, display: Display) -> Path | None:
    """Renames an earlier run's folder: a new run must neither destroy it nor mix with it.

    Returns: the folder's new name; None: there was no earlier run.
    """
    if not os.path.exists(folder):
        return None
    number = 1
    while folder.with_name(f"{folder.name}.previous-{number}").exists():
        number += 1
    target = folder.with_name(f"{folder.name}.previous-{number}")
    # That run may not have ended.
    lock = held(folder) if os.path.exists(folder / LOCK) else nullcontext()
    with lock, writing("another name for the earlier run", folder.parent):
        folder.rename(target)
    display.say(f"moved the earlier run to {target} (--resume would have continued it)")
    return target


def _move_back(folder: Path, earlier: Path | None, display: Display) -> None:
    """Undoes `_open_run` where the text is refused: `--resume` has to find the earlier run."""
    with suppress(OSError):
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
        if earlier is not None:
            earlier.rename(folder)
            display.say(f"moved the earlier run back to {folder}")
