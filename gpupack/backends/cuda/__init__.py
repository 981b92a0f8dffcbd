"""The CUDA backend: device memory, launches, events and buffers."""
