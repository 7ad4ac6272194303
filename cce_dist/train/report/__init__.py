"""Reports of a run: its curve, held-out loss and memory, and a comparison with dense logits."""
