"""The errors that users meet. Each says what was wrong, the value it had, and what is allowed."""

from __future__ import annotations


class SizingError(ValueError):
    """Something asked for cannot be sized; the message names the argument or field, its value and what is allowed."""

    def __init__(self, what: str, value: object, allowed: str) -> None:
        """Say that `what`, which was `value`, is not as `allowed`."""
        super().__init__(f"{what}={value!r}: {allowed}")


class AdapterError(ValueError):
    """An adapter was refused. Nothing was changed: what was staged, registered and active before still is."""
