"""Tasks: their description, their files, their variants and limits."""
