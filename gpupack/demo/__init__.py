"""A small continuous-batching loop with a real model, to show gpupack at work."""
