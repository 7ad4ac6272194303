"""The loss inside other libraries' training loops: torch.distributed.pipelining."""
