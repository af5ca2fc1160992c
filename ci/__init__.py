"""What maintainers run: the checks, and tools that measure the tests, the versions and the size of the project."""
