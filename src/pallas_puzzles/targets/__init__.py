"""What other machines say of a kernel: JAX's simulator, the compilers."""
