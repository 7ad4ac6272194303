"""The head's phases under torch's schedules, on the last stage, or as a schedule."""
