"""Paged memory for keys and values: page allocation, the tensors of the pages, and the cache of whole prompts."""
