"""Media of models that cut a picture into tiles or slices, each of which their tower takes by itself."""
