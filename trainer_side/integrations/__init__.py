"""Where frameworks are met by name: one module for each, which imports it."""
