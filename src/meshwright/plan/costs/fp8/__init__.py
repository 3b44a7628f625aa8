"""What fp8 changes in the costs of a step: matmuls and casts, copies of weights, and saved activations."""
