"""A model whose token ids are dealt out to ranks: each gets as many frequent ids as the others."""
