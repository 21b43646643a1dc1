"""Tasks, their files and variants, episodes and metrics."""
