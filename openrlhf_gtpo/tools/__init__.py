"""Tools beside training. No module that trains imports them."""
