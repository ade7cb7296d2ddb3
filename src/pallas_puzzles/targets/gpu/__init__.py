"""The GPU compiler on a machine without a GPU."""
