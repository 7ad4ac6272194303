"""Small models trained with every method, and what they predict."""
