"""The perplexity of texts by a checkpoint: `cce-dist eval`."""
