"""Step 3 by kernels: the products that give the gradients."""
