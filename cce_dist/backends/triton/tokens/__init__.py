"""Tokens that count: picked, ordered by similarity, merged over ranks."""
