"""One module for each framework, which imports it, and ``gathered`` for those that hand over (name, tensor) pairs."""
