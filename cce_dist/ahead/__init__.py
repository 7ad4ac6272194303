"""Compilation ahead of time: a job's kernels on a machine without a GPU."""
