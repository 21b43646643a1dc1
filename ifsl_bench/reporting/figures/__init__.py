"""Figures for papers, drawn from results and from trained models: one module a kind, each with a function ``draw``."""
