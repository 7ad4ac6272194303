"""What was measured, as records in docs/evidence/, and the report that is made of them."""
