__version__ = "0.3.0"
RELEASED = "2026-11-27"
