"""``Selection``: which tensors of a model are published, and under which names."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from vllm_delta_sync.errors import UsageError

Patterns = str | Sequence[str]
"""A glob pattern of names, or several."""
Rename = Mapping[str, str] | Callable[[str], str]
"""Prefix of a name → what replaces it; or a function of the name."""


class Selection:
    """The arguments ``include``, ``exclude`` and ``rename`` of ``Publisher``, applied in this order.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self, include: Patterns | None = None, exclude: Patterns | None = None, rename: Rename | None = None
    ) -> None:
        self._include, self._exclude = _patterns("include", include), _patterns("exclude", exclude)
        self._rename = rename
        self._prefixes: list[str] = []
        if isinstance(rename, Mapping):
            for prefix, replacement in rename.items():
                if not isinstance(prefix, str) or not prefix or not isinstance(replacement, str):
                    raise UsageError(
                        f"rename has {prefix!r}: {replacement!r}; give prefixes of names and their replacements, such "
                        "as {'actor.': ''}"
                    )
            self._prefixes = sorted(rename, key=len, reverse=True)
        elif rename is not None and not callable(rename):
            raise UsageError(
                f"rename is a {type(rename).__name__}; give a mapping of prefixes, such as {{'actor.': ''}}, or a "
                "function that takes a name and returns one"
            )
        self._unused = {("include", each) for each in self._include} | {("exclude", each) for each in self._exclude}
        self._unused |= {("rename", prefix) for prefix in self._prefixes}

    @property
    def is_everything(self) -> bool:
        """Whether all tensors are published under their own names."""
        return not self._include and not self._exclude and not self.renames

    @property
    def renames(self) -> bool:
        return self._rename is not None

    def keeps(self, name: str) -> bool:
        """Return whether the parameter or buffer of this name is published."""
        included = [self._matches("include", pattern, name) for pattern in self._include]
        excluded = [self._matches("exclude", pattern, name) for pattern in self._exclude]
        return (any(included) or not included) and not any(excluded)

    def renamed(self, name: str) -> str:
        """Return the name in the run; of several prefixes that match, the longest is replaced."""
        if callable(self._rename):
            found = self._rename(name)
            if not isinstance(found, str):
                raise UsageError(f"rename returns {found!r} for {name!r}; return a name")
            return found
        for prefix in self._prefixes:
            if self._rename is not None and name.startswith(prefix):
                self._unused.discard(("rename", prefix))
                return self._rename[prefix] + name.removeprefix(prefix)
        return name

    def check_used(self, names: Sequence[str]) -> None:
        """Raise UsageError if a pattern or prefix has matched no name so far. Args: names: some, for the message."""
        for argument, pattern in sorted(self._unused):
            shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
            raise UsageError(f"{argument} has {pattern!r}, which matches no tensor of the model ({shown}); correct it")

    def _matches(self, argument: str, pattern: str, name: str) -> bool:
        found = fnmatchcase(name, pattern)
        if found:
            self._unused.discard((argument, pattern))
        return found


def _patterns(argument: str, given: Patterns | None) -> tuple[str, ...]:
    found = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if given is not None and (not found or not all(isinstance(each, str) and each for each in found)):
        raise UsageError(f"{argument} is {given!r}; give a pattern of names, such as 'v_head.*', or a sequence of them")
    return found
