"""The decoder, its head and loss, and their shards."""
