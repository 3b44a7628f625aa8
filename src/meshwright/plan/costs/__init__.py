"""Estimated costs of a training step: profile of the job, memory, communication and time."""

from typing import Literal

Basis = Literal["compiled", "computed", "assumed"]
"""Basis of a figure: a compiled program, shapes and data sheets, or an estimate."""
