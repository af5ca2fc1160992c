"""What concerns a process and none of its tasks: temporary folders, standard streams, long waits, threads in turn."""
