"""Records of measurements in docs/notebook/data/evidence, and the pages made of them."""
