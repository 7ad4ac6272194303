"""Records that the layers hand over; memory, side streams and tracers of a call."""
