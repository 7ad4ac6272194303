"""Step 1 by kernels: the statistics of each token, and what the filter records."""
