"""Random configurations of the maps and of linear attention, checked against a second statement of the formula."""
