"""What an operator sees of a running server: the greeting, health, configuration, metrics and profiles."""
