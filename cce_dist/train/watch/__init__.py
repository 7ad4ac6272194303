"""Ranks that watch one another: heartbeats, and the rank to blame for a failure."""
