"""Check random configurations of the maps and of linear attention against an independent implementation."""
