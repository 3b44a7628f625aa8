"""Plans of a training step before it runs: memory, communication and time on hardware you may not have."""

from meshwright.lazy import lazy_names

_MODULES = {
    "Plan": "meshwright.plan.plan",
    "PlanError": "meshwright.plan.check",
    "Setup": "meshwright.plan.step_setup",
    "assert_plan": "meshwright.plan.check",
    "compile_step": "meshwright.plan.compiled.compile",
    "diff_plans": "meshwright.plan.output.plan_diff",
    "make_plan": "meshwright.plan.plan",
    "parse_target": "meshwright.plan.target",
    "profile_job": "meshwright.plan.costs.job_costs",
}
__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
