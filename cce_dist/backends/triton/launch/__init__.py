"""How kernels are loaded and started, and the shapes of their tiles."""
