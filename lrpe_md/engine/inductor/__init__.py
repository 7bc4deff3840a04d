"""Private names of torch: of its compiler and its dispatcher."""
