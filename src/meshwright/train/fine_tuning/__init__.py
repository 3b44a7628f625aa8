"""Training a part of a model: frozen parameters and low-rank adapters."""
