"""A step compiled for a target: the compiler's process, its program's text, and each collective judged."""
