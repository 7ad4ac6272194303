"""Triton's interpreter, faster: for tests, and for the doctor where kernels are interpreted."""

from cce_dist.testing.interpreter.speed_up import speed_up_interpreter

__all__ = ["speed_up_interpreter"]
