"""Plans made readable: text now, other media beside it."""
