"""The way to the engine, which is a process of its own. The rest of the HTTP process knows the engine by this alone."""
