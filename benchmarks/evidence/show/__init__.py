"""Sections of the report, one for each kind of record, and the report's summary."""
