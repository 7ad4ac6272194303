"""Files on a disk that may be full or read-only: errors become one message with a remedy."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError, JobError
from .progress import format_bytes

# A file system may keep a file of a few bytes in its index, also when it has no block left.
PROBE_BYTES = 2**16
# In a run's folder.
LOCK = ".lock"
GO_ON = (
    "free space, or make the folder writable, and start the same command with --resume: it goes "
    "on from the newest checkpoint"
)


@contextmanager
def writing(
    name: str, folder: Path, remedy: str = GO_ON, *, scrap: Path | None = None
) -> Iterator[None]:
    """Turns an OSError of files in `folder` into one message.

    Args:
        name: name of the file or files, at the start of the message.
        scrap: an unfinished folder, which is removed if writing fails: it takes up scarce space.
    Raises:
        JobError: with the reason, the free space and the remedy.
    """
    try:
        yield
    except (OSError, JobError) as error:
        failure = error
        if isinstance(error, OSError):
            failure = JobError(
                f"{name} could not be written in {folder}: {reason_of(error)}; "
                f"{_free_text(folder)}. To do: {remedy}"
            )
        if scrap is not None:
            shutil.rmtree(scrap, ignore_errors=True)
        raise failure from None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a run's folder, also if it is renamed: another job must not write into it. The lock
    ends with the process, however that ends.

    Raises:
        ConfigError: another job holds the folder.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context((folder / LOCK).open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.name must be that of no job that is running, got {folder.name!r}, and "
                f"another job writes to {folder}: wait for its end, or set another run.name"
            ) from None
        except OSError:
            # Nothing can be written there, as later messages say, or the file system has no locks.
            pass
        yield


def require_space(folder: Path, key: str, num_bytes: int) -> None:
    """Makes the folder and checks, before long work, that the work's result can be written there.

    Args:
        key: the key of the configuration that names the folder or one above it.
        num_bytes: size of the first result.
    Raises:
        ConfigError: the folder cannot be made or written, or has less than num_bytes of space.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The test file has no name: it leaves no trace if the job is killed here.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{key} must be in a folder that can be written, got {folder}: {reason_of(error)}; "
            f"{_free_text(folder)}. To do: free space, make it writable, or set {key} to another "
            "folder"
        ) from None
    free = _free_bytes(folder)
    if free is not None and free < num_bytes:
        raise ConfigError(
            f"{key} must be in a folder with {format_bytes(num_bytes)} of free space for a "
            f"checkpoint, got {format_bytes(free)} in {folder}: free space, or set {key} to "
            "another folder"
        )


def read_text(path: Path, argument: str) -> str:
    """Reads a UTF-8 file. The ends of its lines stay as they are.

    Args:
        argument: the key or option that names the file, for the message.
    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf8")
    except OSError as error:
        raise ConfigError(f"{argument}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{argument}: {path} must be UTF-8 text, got the byte "
            f"0x{error.object[error.start]:02x} at offset {error.start}"
        ) from None


def reason_of(error: OSError) -> str:
    # NumPy's OSError has only a text.
    return error.strerror or str(error)


def _free_text(folder: Path) -> str:
    free = _free_bytes(folder)
    return "its free space is unknown" if free is None else f"{format_bytes(free)} are free there"


def _free_bytes(folder: Path) -> int | None:
    """Returns the free bytes of the disk; None: the file system does not say."""
    for path in (folder, *folder.parents):
        # The folder may be missing, or hidden from this user.
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            # /proc and some network file systems report a total of 0.
            return usage.free if usage.total else None
    return None
