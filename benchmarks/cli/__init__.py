"""The commands of a checkout, by the module that holds their work."""
