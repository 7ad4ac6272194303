"""Sums over the rows of a tile that Hopper's forward has in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_sums(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds the rows that a thread of four warps holds: [ROWS, COLUMNS] -> [4, 8, COLUMNS]."""
    split = gl.reshape(x, (ROWS // 64, 4, 2, 8, COLUMNS))
    return gl.sum(gl.sum(split, 2), 0)


@gluon.jit
def whole_sum(x, layout: gl.constexpr):
    """Sums [4, 8, COLUMNS] -> [COLUMNS], over lanes first: the sums of warps then fit little
    shared memory."""
    return gl.convert_layout(gl.sum(gl.sum(x, 1), 0), layout)
