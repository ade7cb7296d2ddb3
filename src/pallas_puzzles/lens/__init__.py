"""What a kernel does: it runs step by step in NumPy."""
