"""Experiments: run configurations, jobs, stages, the runner and its back ends, search, plan, status."""
