"""The errors that name a setting or a field of a request."""

from __future__ import annotations


class ParameterError(ValueError):
    """A setting has a value that is not allowed.

    Args:
        param: name of the setting.
        message: what is wrong with its value and what is allowed, without the name.
    """

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param, self.message = param, message


class ContextLengthError(ParameterError):
    """A prompt, or a prompt with the answer that is asked for, has more tokens than the model takes."""


def context_length(max_model_len: int) -> str:
    """The limit in the words by which clients know it: some of them look for these in order to shorten a prompt."""
    return f"this model's maximum context length is {max_model_len} tokens (max_model_len)"
