"""Parts of any process: temporary folders, standard streams, progress of long work, threads that take turns."""
