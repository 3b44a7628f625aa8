"""Published figures of accelerators (`chips`) and FLOP counts of programs (`flops`)."""
