"""The HTTP process's side of the engine, and the engine process itself."""
