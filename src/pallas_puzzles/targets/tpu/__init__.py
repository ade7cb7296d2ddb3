"""The TPU compiler on a machine without a TPU."""
