"""Reading the text of a compiled program: its instructions, matmuls, groups of devices, and what arrays stand for."""
