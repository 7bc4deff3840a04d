"""The program ``lrpe-md visualize``, and figures for the documentation."""
