"""The report page of a run, built from its folder during or after the run."""

from meshwright.loop.report.run_page import build_report

__all__ = ["build_report"]
