"""Figures of results and of trained models for papers: a module a kind, each with a ``draw``."""
