"""The errors that end a job with one message and no traceback."""

from __future__ import annotations


class JobError(Exception):
    """Something the user can put right; its text says what. Exit code 1."""

    exit_code = 1


class ConfigError(JobError):
    """A key of the configuration, or the text it points to, is not valid. Exit code 2."""

    exit_code = 2
