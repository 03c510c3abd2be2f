"""``delta-sync completion``: prints a script for a shell, which asks ``delta-sync completion words`` at each TAB."""

import argparse
from typing import Any

from vllm_delta_sync.cli.command import Report, command, option

BASH = """\
_delta_sync() {
    COMPREPLY=($(delta-sync completion words "${COMP_LINE:0:COMP_POINT}" 2> /dev/null))
}
complete -o default -F _delta_sync delta-sync
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = """\
complete -c delta-sync -a '(delta-sync completion words (commandline -cp | string collect) 2> /dev/null)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH + BASH, "fish": FISH}


@command(
    "completion",
    "print a script that completes command lines",
    option("shell", choices=(*SCRIPTS, "words"), metavar="bash|zsh|fish|words", help="the shell"),
    option("line", nargs="?", default="", metavar="LINE", help="with words: the command line up to the cursor"),
)
def completion(options: argparse.Namespace) -> Report:
    """Print a script with which a shell completes command lines of delta-sync.

    Completes commands, flags, and values with a fixed choice; elsewhere names of files.

    examples:
      delta-sync completion bash > ~/.local/share/bash-completion/completions/delta-sync
      delta-sync completion zsh >> ~/.zshrc
      delta-sync completion fish > ~/.config/fish/completions/delta-sync.fish
    """
    if options.shell == "words":
        words = _completions(options.line, options.parser)
        return Report({"words": words}, lambda data: print(*data["words"], sep="\n"))
    return Report(
        {"shell": options.shell, "script": SCRIPTS[options.shell]}, lambda data: print(data["script"], end="")
    )


def _completions(line: str, parser: Any) -> list[str]:
    """Return what may stand in place of the last word; nothing where a value is free text or the name of a file.

    Args:
        parser: the ``Parser`` of the whole command line.
    """
    *before, current = line.split(" ")[1:] or [""]
    previous = ""
    valued = {flag for child in parser.commands.values() for action in child._actions if action.nargs != 0
              for flag in action.option_strings}  # fmt: skip
    for word in before:
        if word in parser.children and previous not in valued:
            parser = parser.children[word]
        previous = word
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    if previous in valued:
        choices = flags[previous].choices if previous in flags else ()
    elif current.startswith("-"):
        choices = list(flags)
    else:
        choices = next((a.choices for a in parser._actions if not a.option_strings and a.choices), ())
    return [choice for choice in choices or () if choice.startswith(current) and choice != "words"]
