"""The tokens that TRL's fused head ignores, left out by the loss.

On a GPU TRL picks the rows of the tokens that count by a mask, and the host waits for the device
twice. On other devices TRL hands over every row, and sets the results of ignored tokens to 0. Under
this module it does so on GPUs too. The loss reads the mask among the local variables of TRL's
function.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

# The name of TRL's function that says of a device whether rows are picked there.
PICKS_ROWS = "_use_triton"
MAKER, FORWARD = "add_fused_lm_head", "_fused_forward"
MASK, PICKED = "mask", "compact"
# Lines of the forward, without which these names may mean something else.
LINES = ("mask = labels != -100", "labels[mask] if compact else labels.clamp(min=0).reshape(-1)")


class Mask:
    """The mask of a fused head's forward, from `install` to `remove`.

    A TRL whose forward is another (1.15 is), and a compiled one, pick rows as ever.

    Args: utils: `trl.trainer.utils`.
    """

    def __init__(self, utils: Any) -> None:
        self.utils = utils
        self.picks_rows: Any = getattr(utils, PICKS_ROWS, None)
        maker = getattr(utils, MAKER, None)
        self.code = None if self.picks_rows is None else _code_of_forward(maker)
        self.replacement = self._picks_rows

    def install(self) -> None:
        if self.code is not None:
            setattr(self.utils, PICKS_ROWS, self.replacement)

    def remove(self) -> None:
        if self.code is not None and getattr(self.utils, PICKS_ROWS) is self.replacement:
            setattr(self.utils, PICKS_ROWS, self.picks_rows)

    def of_caller(self) -> Tensor | None:
        """Returns which tokens count, bool [N]; None: all that the caller has handed over."""
        frame = self._forward(2)
        if frame is None or frame.f_locals[PICKED]:
            return None
        return frame.f_locals[MASK].reshape(-1)

    def _picks_rows(self, device: torch.device) -> bool:
        return self.picks_rows(device) if self._forward(1) is None else False

    def _forward(self, depth: int) -> FrameType | None:
        """Returns the frame `depth` calls above the caller's, if it is the forward's."""
        # Compiled code has no frame.
        if self.code is None or torch.compiler.is_compiling():
            return None
        frame = sys._getframe(1 + depth)
        return frame if frame.f_code is self.code else None


@functools.cache
def _code_of_forward(maker: Any) -> CodeType | None:
    """Returns the code of the forward that `maker` makes, if it is the known one."""
    try:
        source, codes = inspect.getsource(maker), maker.__code__.co_consts
    except (AttributeError, TypeError, OSError):
        return None
    if not all(line in source for line in LINES):
        return None
    named = (x for x in codes if isinstance(x, CodeType) and x.co_name == FORWARD)
    return next(named, None)
