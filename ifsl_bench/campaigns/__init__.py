"""Campaigns: many jobs, from a file or a call; what they would do, do and have done."""
