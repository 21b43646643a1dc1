__version__ = "0.2.0"
RELEASED = "2026-11-23"
