"""The program ``lrpe-md train``, which trains models."""
