"""The error that names a setting."""

from __future__ import annotations


class ParameterError(ValueError):
    """A setting has a value that is not allowed.

    Args:
        param: name of the setting.
        message: what is wrong with its value and what is allowed, without the name.
    """

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param
