"""From a command to stored results: jobs, stages, provenance, checks."""
