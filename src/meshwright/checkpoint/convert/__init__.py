"""Conversion of checkpoints to and from Hugging Face folders, and from trees of tensor-parallel linen layers."""
