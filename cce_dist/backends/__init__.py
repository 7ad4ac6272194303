"""One rank's share of the loss: the backends' protocol, and the choice of a backend."""
