"""``Command`` is one subcommand of ``delta-sync``: its options, its help, and the function that runs it.

That function takes the parsed options and returns a ``Report``: the data of ``--json``, how to print them for people,
and the error that ends the command, if any.
"""

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_delta_sync.errors import DeltaSyncError

Option = Callable[[argparse.ArgumentParser], object]
"""Adds one option or more to a parser."""


def option(*flags: str, **settings: Any) -> Option:
    """Return an option; arguments as those of ``ArgumentParser.add_argument``."""
    return lambda parser: parser.add_argument(*flags, **settings)


@dataclass(frozen=True)
class Report:
    """What a command found or did.

    Attributes:
        data: for ``--json``; None if all was printed as it came.
        show: prints data as text. None: there is no text but the error.
        error: why the command fails; it has the exit code. ``show``, if there is one, says the same to people.
    """

    data: dict[str, Any] | None = None
    show: Callable[[Any], object] | None = None
    error: DeltaSyncError | None = None


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: its whole name, such as ``log`` or ``tag set``. brief: one line for the list of commands.
        text: of its help: a paragraph that describes it, then what follows the list of options.
        failed, done: what exit codes 1 and 0 mean; without ``failed`` its help lists no exit codes.
    """

    name: str
    brief: str
    text: str
    options: tuple[Option, ...]
    run: Callable[[argparse.Namespace], Report]
    failed: str = ""
    done: str = "done"

    def add(self, commands: "argparse._SubParsersAction[Any]") -> None:
        """Add its parser to those of the other commands."""
        description, _, rest = self.text.partition("\n\n")
        if self.failed:
            rest += (
                f"\n\nexit codes:\n  0 {self.done}\n  1 {self.failed}\n"
                "  2 usage, 3 no such run or version, 4 store or network, 5 another writer, 130 interrupted\n"
            )
        parser = commands.add_parser(
            self.name.split()[-1], help=self.brief, description=" ".join(description.split()), epilog=rest
        )
        for add_option in self.options:
            add_option(parser)
        parser.add_argument("--json", action="store_true", help="print JSON: one line, {ok, command, data, error}")
        parser.set_defaults(spec=self)

    @property
    def examples(self) -> str:
        """The example lines of its help."""
        return self.text.partition("examples:\n")[2]


def command(
    name: str, brief: str, *options: Option, failed: str = "", done: str = "done"
) -> Callable[[Callable[[argparse.Namespace], Report]], Command]:
    """Make a function a ``Command``, whose text is the function's docstring."""
    return lambda run: Command(name, brief, inspect.getdoc(run) or "", options, run, failed, done)
