"""One step of a batch, on the CPU or on a GPU."""
