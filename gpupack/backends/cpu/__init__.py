"""The CPU backend: one compiled loop over the batch."""
