"""Conversion of checkpoints to and from Hugging Face Llama files, and from trees of tensor-parallel linen layers."""
