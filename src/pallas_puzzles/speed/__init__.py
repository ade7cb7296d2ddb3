"""How far a kernel is from the speed of light: measured where its chip is, estimated by its compiler where not."""
