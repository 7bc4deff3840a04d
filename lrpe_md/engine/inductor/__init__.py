"""Code that depends on private names of torch: of its compiler and its dispatcher."""
