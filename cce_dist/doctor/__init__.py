"""What is right and wrong with a machine, its software and its ranks: `cce-dist doctor`."""
