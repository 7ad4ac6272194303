"""Tests, in folders as the package has them; here those of the whole repository."""
