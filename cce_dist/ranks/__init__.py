"""The collectives of the loss, over torch.distributed or MPI."""
