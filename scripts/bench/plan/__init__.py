"""Predicts a decoding step: what it cannot do without on a device, or the tasks of captured graphs added up."""
