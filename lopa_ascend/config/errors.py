"""The error of a setting or a field with a wrong value: where that stands, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

FieldPath = tuple[str | int, ...]
"""Names of fields and indices in lists, from the outside in."""


def path_of(field: str | FieldPath) -> FieldPath:
    """The path of a field, which may be a name alone."""
    return (field,) if isinstance(field, str) else field


def printed(field: str | FieldPath) -> str:
    """A field as messages name it: ``messages[3].content``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path_of(field))
    return "".join(parts).removeprefix(".")


class ParameterError(ValueError):
    """A setting, or a part of its value, is not allowed.

    Args:
        param: name of the setting, or the ``path`` of the part. The attribute is the path as messages name it.
        message: what is wrong and what is allowed. If it names settings, a function that asks how each is spelt:
            requests have other names for some.
    """

    def __init__(self, param: str | FieldPath, message: str | Callable[[Callable[[str], str]], str]):
        self.path = path_of(param)
        self.param = printed(self.path)
        self._message = message
        self.message = message if isinstance(message, str) else message(str)
        super().__init__(f"{self.param}: {self.message}")

    def at(self, field: str | FieldPath) -> ParameterError:
        """The same error with another path."""
        return type(self)(field, self._message)

    def under(self, *path: str | int) -> ParameterError:
        """The same error, with ``path`` before its own."""
        return self.at((*path, *self.path))

    def renamed(self, fields: Mapping[str, str | FieldPath]) -> ParameterError:
        """The same error with the fields that stand for settings, by name of the setting."""
        first, *rest = self.path
        path = (*path_of(fields.get(str(first), (first,))), *rest)
        if isinstance(tell := self._message, str):
            return self.at(path)
        return type(self)(path, lambda spelt: tell(lambda name: spelt(printed(fields.get(name, name)))))


class ContextLengthError(ParameterError):
    """A prompt, or a prompt with the answer that is asked for, has more tokens than the model takes."""


def context_length(max_model_len: int) -> str:
    """The limit in the words by which clients know it: some of them look for these in order to shorten a prompt."""
    return f"this model's maximum context length is {max_model_len} tokens (max_model_len)"
