"""The sections of the report, one for each kind of record, and its summary."""
