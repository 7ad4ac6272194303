"""One rank's share of the loss: what a backend is, and which one a call takes."""
