"""The device side of a packer: memory, streams and events, buffers in turn, what a launch is told, CUDA graphs."""
