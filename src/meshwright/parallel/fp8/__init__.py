"""fp8 matmuls: scales, casts, and products with gradients, in every view."""
