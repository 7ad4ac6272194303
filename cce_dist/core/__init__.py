"""Records that the layers hand over, and how a call uses memory, streams and tracers."""
