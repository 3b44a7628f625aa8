"""The page about a plan: one HTML file that shows the program before it runs."""

from meshwright.plan.report.build import build_plan_page, render_plan

__all__ = ["build_plan_page", "render_plan"]
