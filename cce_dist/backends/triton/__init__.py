"""Backend `triton`: kernels on one rank's shard, which never make the host wait."""
