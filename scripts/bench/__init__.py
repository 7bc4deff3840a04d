"""The program ``lrpe-md bench``, which runs benchmarks."""
