"""Letters rendered from the twelve DejaVu faces."""
