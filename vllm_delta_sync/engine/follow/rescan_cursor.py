"""Which tensors to rescan next: all of them in turn, so much at a time."""


class RescanCursor:
    """Walks over tensors again and again.

    Args:
        sizes: bytes per tensor id. limit: bytes to hand out at a time; 0: none. At least one tensor otherwise.
    """

    def __init__(self, sizes: list[int], limit: int) -> None:
        self._sizes = sizes
        self._limit = limit
        self._position = 0

    def next(self) -> list[int]:
        """The next tensor ids, each at most once."""
        found: list[int] = []
        room = self._limit
        while room > 0 and len(found) < len(self._sizes):
            found.append(self._position)
            room -= max(1, self._sizes[self._position])
            self._position = (self._position + 1) % len(self._sizes)
        return found
