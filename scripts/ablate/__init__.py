"""The program ``lrpe-md ablate``, which compares encodings by training the same model with each encoding."""
