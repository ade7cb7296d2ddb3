"""A wrong output: what is wrong with each block, and what the blocks have in common."""
