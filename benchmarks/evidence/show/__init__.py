"""Pages of the evidence: a module for each kind of record."""
