"""The loss, the kernels and the tables of the paper: what is timed, and what is lost."""
