"""One trainer a file: `build` makes its model for a shape and a layout on this rank, and gives a function that does
one optimizer update and returns its loss."""
