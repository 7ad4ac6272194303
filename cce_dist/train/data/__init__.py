"""Text, its vocabulary, and batches of tokens."""
