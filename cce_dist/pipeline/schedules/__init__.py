"""The head under torch's schedules, on the last stage alone, or in a schedule of its own."""
