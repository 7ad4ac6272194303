"""Commands of a checkout, in files named after the modules that do the work."""
