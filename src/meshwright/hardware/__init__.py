"""Published figures of accelerators (`chips`) and the operations a program needs (`flops`)."""
