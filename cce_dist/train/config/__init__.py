"""The job's configuration: its keys, its file, and its fit to the number of ranks."""
