"""Logits of 8 bits, their error, and exact logits where they count."""
