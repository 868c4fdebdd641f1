"""How much of others' messages may wait here: bounded in number and in bytes, in all and of each sender. Pure counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Of the whole room one sender may take this part, so that a single one cannot keep everybody else's messages out.
SHARE = 8


@dataclass
class Room:
    """Room for `messages_max` messages of together `bytes_max` bytes; one sender gets an eighth of each."""

    messages_max: int
    bytes_max: int
    messages: Counter[str] = field(default_factory=Counter)  # by sender
    bytes: Counter[str] = field(default_factory=Counter)

    def take(self, sender: str, size: int) -> bool:
        """Make room for a message of `size` bytes. False, with nothing changed, when there is none. A sender that has
        nothing here may put in one message of any size that fits into the whole."""
        if self.messages.total() >= self.messages_max or self.bytes.total() + size > self.bytes_max:
            return False
        many = self.messages[sender] >= max(1, self.messages_max // SHARE)
        if many or (self.messages[sender] and self.bytes[sender] + size > self.bytes_max // SHARE):
            return False
        self.messages[sender] += 1
        self.bytes[sender] += size
        return True

    def give_back(self, sender: str, size: int) -> None:
        """A message taken in is gone."""
        self.messages[sender] -= 1
        self.bytes[sender] -= size
        if not self.messages[sender]:
            del self.messages[sender], self.bytes[sender]

    def clear(self) -> None:
        """Everything is gone."""
        self.messages.clear()
        self.bytes.clear()
