"""What JAX made of a reader's function: the only part that reads JAX's own program."""
