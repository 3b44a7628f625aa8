"""The report of a run: one page from what its folder holds, while it runs or after."""

from meshwright.loop.report.run_page import build_report

__all__ = ["build_report"]
