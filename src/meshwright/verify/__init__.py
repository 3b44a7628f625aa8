"""Comparison of a job's step on a mesh with its step on one device, leaf by leaf.

report = verify(job, meshes=["fsdp:8", "fsdp:4,tp:2"])
report.require()                                     # raises with the table and the likely cause if they differ
"""

from meshwright.lazy import make_callable
from meshwright.verify.compare import Comparison, LeafDifference, Ratio
from meshwright.verify.diagnose.causes import Cause
from meshwright.verify.equivalence import verify
from meshwright.verify.example_batch import example_batch
from meshwright.verify.fuzz import FuzzCase, FuzzReport, fuzz
from meshwright.verify.report import Case, VerifyReport

__all__ = [
    "verify",
    "fuzz",
    "FuzzReport",
    "FuzzCase",
    "example_batch",
    "VerifyReport",
    "Case",
    "Comparison",
    "LeafDifference",
    "Ratio",
    "Cause",
]

make_callable(__name__, "meshwright.verify.equivalence:verify")  # `mw.verify(job)`
