"""What a step costs by arithmetic: what a job needs, its memory, its communication, its time."""

from typing import Literal

Basis = Literal["compiled", "computed", "assumed"]
"""What a figure rests on: a compiled program, shapes and data sheets, or an estimate."""
