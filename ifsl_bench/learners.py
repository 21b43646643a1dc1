"""The former name of :mod:`ifsl_bench.solvers`."""

from ifsl_bench.utils.deprecated import forward_module_names

__getattr__ = forward_module_names("ifsl_bench.learners", "ifsl_bench.solvers")
