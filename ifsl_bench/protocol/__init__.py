"""What is measured: tasks, their files and variants, episodes and metrics."""
