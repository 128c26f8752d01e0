"""The error of a message that breaks the contract."""

from wildflower.devices.validation import one_line


class MessageError(ValueError):
    """A message that breaks the contract: the text, one line, says what was wrong, where, and what would be right."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text))
