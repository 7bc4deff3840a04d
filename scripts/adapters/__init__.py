"""The program ``lrpe-md adapters``, which tests ``adapt_rotary`` on the models of installed libraries."""
