"""A faster interpreter of Triton kernels, for tests, and for the doctor."""

from cce_dist.testing.interpreter.speed_up import speed_up_interpreter

__all__ = ["speed_up_interpreter"]
