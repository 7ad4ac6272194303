"""All that ranks say to each other, over torch.distributed or MPI."""
