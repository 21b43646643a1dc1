"""Experiments: run configurations, jobs and their stages, the runner and its back ends, search, plan and status."""
