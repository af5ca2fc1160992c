"""The engine as a process of its own: the process itself, its messages, and the client in the HTTP process."""
