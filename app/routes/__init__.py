"""One module a group of endpoints. Each route parses, calls the engine, and renders."""
