"""From a public call to the kernels, or to the reference."""
