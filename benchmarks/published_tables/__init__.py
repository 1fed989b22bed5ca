"""One module for each kind of published table: read the rows, predict, compare."""
