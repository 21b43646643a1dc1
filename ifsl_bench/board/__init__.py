"""The way from result files to tables; docs/architecture.md has the way, docs/statistics.md the mathematics."""
