"""Step 1 by kernels: the statistics of each token, and the filter's records."""
