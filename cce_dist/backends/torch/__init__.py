"""Backend `torch`: eager tiles of the logits, on any device."""
