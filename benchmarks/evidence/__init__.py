"""Records of measurements in docs/evidence/, and the report that is made from them."""
