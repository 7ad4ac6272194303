"""The logger of the integrations, whose messages show without a configuration of logging too."""

from __future__ import annotations

import logging
import os


class _UnlessConfigured(logging.StreamHandler):
    """Writes rank 0's messages to stderr where nobody has configured logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and os.environ.get("RANK", "0") == "0":
            super().emit(record)


logger = logging.getLogger("cce_dist.integrations")
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
logger.addHandler(_UnlessConfigured())
