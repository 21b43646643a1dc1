"""Compiled code: the problems of single episodes on a CPU, in loops over NumPy arrays, by Numba.

A torch operation on the numbers of an episode costs several times what it computes, and a batch of episodes waits for
its slowest. Here an episode is solved from its support set to its fast weights in one call, on one core, in double
precision. `ifsl_bench.learners.compiled` hands tensors in and out. On other devices batched torch solves the same
problems.

Modules of kernels import numba, which takes a while, so nothing imports them before something is solved.
"""
