"""What commands report about records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_SHOWN = 10
"""Number of records of each finding that are named."""


@dataclass
class Finding:
    """Records with something in common."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Descriptions of the first of them."""

    def add(self, description: str) -> None:
        """Count a record."""
        self.count += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(description)

    def lines(self) -> Iterator[str]:
        """Yield the descriptions, and how many more there are."""
        yield from (f"  {each}" for each in self.first)
        if self.count > len(self.first):
            yield f"  ... and {self.count - len(self.first):,} more"
