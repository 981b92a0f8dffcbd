"""Triton kernels of gpupack, installed as `gpupack.kernels`."""
