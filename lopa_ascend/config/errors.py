"""The error of a setting or a field with a wrong value: its place, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

FieldPath = tuple[str | int, ...]
"""Names of fields and indices in lists, from the outside in."""


def path_of(field: str | FieldPath) -> FieldPath:
    return (field,) if isinstance(field, str) else field


def printed(field: str | FieldPath) -> str:
    """A field as messages name it, e.g. ``messages[3].content``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path_of(field))
    return "".join(parts).removeprefix(".")


class ParameterError(ValueError):
    """A setting, or a part of its value, is not allowed.

    Args:
        param: name of the setting, or path of the part. The attribute is ``printed``.
        message: what is wrong and what is allowed; a function of how a setting's name is spelt if it names any.
    """

    def __init__(self, param: str | FieldPath, message: str | Callable[[Callable[[str], str]], str]):
        self.path = path_of(param)
        self.param = printed(self.path)
        self._message = message
        self.message = message if isinstance(message, str) else message(str)
        super().__init__(f"{self.param}: {self.message}")

    def at(self, field: str | FieldPath) -> ParameterError:
        return type(self)(field, self._message)

    def under(self, *path: str | int) -> ParameterError:
        """The same error with ``path`` before its own path."""
        return self.at((*path, *self.path))

    def renamed(self, fields: Mapping[str, str | FieldPath]) -> ParameterError:
        """The same error with fields in place of settings; ``fields`` is by name of the setting."""
        first, *rest = self.path
        path = (*path_of(fields.get(str(first), (first,))), *rest)
        if isinstance(tell := self._message, str):
            return self.at(path)
        return type(self)(path, lambda spelt: tell(lambda name: spelt(printed(fields.get(name, name)))))


class ContextLengthError(ParameterError):
    """A prompt, or a prompt with its answer, has more tokens than the model takes."""


def context_length(max_model_len: int) -> str:
    """The limit in OpenAI's words: some clients look for them to shorten a prompt."""
    return f"this model's maximum context length is {max_model_len} tokens (max_model_len)"
