"""The former name of :mod:`ifsl_bench.solvers`."""

from ifsl_bench.utils.deprecated import forward

__getattr__ = forward("ifsl_bench.learners", "ifsl_bench.solvers")
