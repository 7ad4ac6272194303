"""Work on ranks that watch one another: a failure becomes one message and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from cce_dist.core.phases import watched_by
from cce_dist.train.collectives import wait_for_all
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.errors import JobError, say_error, say_traceback
from cce_dist.train.ranks import Ranks, connect, leave, rank_from_environment
from cce_dist.train.stop import StopRequest, end_at_once

from .heartbeat import Heartbeat

# Seconds that the other ranks wait while one rank reports an error of all ranks: a launcher ends
# every rank as soon as one rank has left.
REPORT_S = 5.0

Work = Callable[[TrainConfig, Ranks, Heartbeat, StopRequest], None]


def run_watched(
    load: Callable[[], TrainConfig], work: Work, kin: Callable[[TrainConfig, Ranks], int]
) -> int:
    """Loads, joins the ranks, works and leaves; returns the exit code.

    A JobError, and any error of joined ranks, ends the process instead of returning: leaving in
    order would wait for ranks that may never come.

    Args:
        load: runs before the ranks are joined; it raises on all ranks or on none.
        work: runs on the joined ranks. A JobError becomes one message, whether it is one rank's or
            all ranks'; the loss of a peer becomes one message, too.
        kin: returns the `kin` of `Heartbeat`.
    """
    end_at_once()
    stop = StopRequest()
    heartbeat = None
    try:
        config = load()
        ranks = connect(config.parallel)
        heartbeat = Heartbeat(
            ranks,
            config.parallel.timeout_s,
            lambda: bool(stop),
            kin=kin(config, ranks),
            in_order=ranks.pp == 1,
        )
        heartbeat.start()
        with watched_by(heartbeat.place):
            work(config, ranks, heartbeat, stop)
        heartbeat.place.phase = "leaving"
        wait_for_all(ranks.device)
    except JobError as error:
        if heartbeat is not None:
            _refuse(error, heartbeat.refuse(error))
        # Before the ranks are joined, all ranks raise the same error.
        _refuse(error, str(error) if rank_from_environment() == 0 else None)
    except BaseException as error:
        # Some errors of libraries are no Exception: torch's checkpoints, Rust's panics.
        if heartbeat is None:
            raise
        _leave_failed(heartbeat, error)
    heartbeat.close()
    leave(ranks)
    return 0


def wait_for_main(ranks: Ranks, key: str) -> None:
    """Waits until the main rank has set `key`, as long as that rank lives."""
    # A collective or the store's `wait` would time out while a large vocabulary is trained.
    while not ranks.store.check([key]):
        time.sleep(0.1)


def _refuse(error: JobError, message: str | None) -> NoReturn:
    """Reports the error, or lets another rank report it, and ends the process."""
    if message is not None:
        say_error(message)
    else:
        time.sleep(REPORT_S)
    _exit(error.exit_code)


def _leave_failed(heartbeat: Heartbeat, error: BaseException) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not heartbeat.comes_from_lost_peer(error):
        say_traceback(error)
    message = heartbeat.explain(error)
    if message is not None:
        say_error(message)
    _exit(1)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        # The stream may go to a file on a full disk.
        with contextlib.suppress(OSError):
            stream.flush()
    # Skip destructors: those of process groups wait for peers that will never come.
    os._exit(code)
