"""One line for each training framework."""
