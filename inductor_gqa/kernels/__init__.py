"""Triton kernels of grouped-query attention. Importing the package imports neither torch nor
triton."""
