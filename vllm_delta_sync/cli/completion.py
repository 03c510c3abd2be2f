"""``delta-sync completion``: prints a script for bash, zsh or fish, made from the parser of the whole command line."""

import argparse
from collections.abc import Iterator
from typing import Any

from vllm_delta_sync.cli.arguments import Answer

EXAMPLES = """\
Completes commands, flags, and values with a fixed choice; elsewhere names of files.

examples:
  delta-sync completion bash > ~/.local/share/bash-completion/completions/delta-sync
  delta-sync completion zsh >> ~/.zshrc
  delta-sync completion fish > ~/.config/fish/completions/delta-sync.fish
"""
BASH = """\
_delta_sync() {{
    local current="$2" previous="$3" command="" words="" word position=0
    for word in "${{COMP_WORDS[@]}}"; do
        [[ $position -ge $COMP_CWORD ]] && break
        position=$((position + 1))
        case "$command $word" in
            {commands}) command="${{command:+$command }}$word" ;;
        esac
    done
    case "$command $previous" in
{choices}
        *)
            case "$previous" in
                {valued}) return ;;
            esac
            case "$command $current" in
{flags}
{operands}
            esac
            ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _delta_sync delta-sync
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = """\
function __delta_sync_command
    set -l command ""
    for word in (commandline -opc)[2..-1]
        if contains -- (string trim "$command $word") {commands}
            set command (string trim "$command $word")
        end
    end
    echo $command
end
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes command lines",
        description="Print a script with which a shell completes command lines of delta-sync.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="bash|zsh|fish", help="the shell")
    parser.set_defaults(handler=_completion)


def _completion(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.cli.main import build_parser

    tree = dict(_tree("", build_parser()))
    script = {"bash": _bash, "zsh": lambda tree: ZSH + _bash(tree), "fish": _fish}[options.shell](tree)
    return {"shell": options.shell, "script": script}, lambda: print(script, end="")


def _tree(name: str, parser: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parser of every command and group, by its whole name; that of ``delta-sync`` itself is unnamed."""
    yield name, parser
    for word, child in parser.children.items():
        yield from _tree(f"{name} {word}".strip(), child)


def _flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _operands(parser: Any) -> list[str]:
    """Return what may stand where no flag does, if it is a fixed choice: commands of a group, or choices."""
    fixed = [action.choices for action in parser._actions if not action.option_strings and action.choices]
    return list(fixed[0]) if fixed else []


def _bash(tree: dict[str, Any]) -> str:
    choices, flags, operands = [], [], []
    valued: set[str] = set()
    for name, parser in tree.items():
        for action in _flags(parser):
            # Abbreviations are not allowed, so these are all spellings.
            if action.nargs != 0:
                valued.update(action.option_strings)
            if action.choices:
                patterns = "|".join(f'"{name} {flag}"' for flag in action.option_strings)
                choices.append(f'        {patterns}) words="{" ".join(action.choices)}" ;;')
        known = " ".join(flag for action in _flags(parser) for flag in action.option_strings)
        flags.append(f'                "{name} -"*) words="{known}" ;;')
        if _operands(parser):
            operands.append(f'                "{name} "*) words="{" ".join(_operands(parser))}" ;;')
    return BASH.format(
        commands="|".join(f'"{" " * (" " not in name)}{name}"' for name in tree if name),
        choices="\n".join(choices),
        valued="|".join(sorted(valued)),
        flags="\n".join(flags),
        operands="\n".join(operands),
    )


def _fish(tree: dict[str, Any]) -> str:
    lines = [FISH.format(commands=" ".join(f'"{name}"' for name in tree if name))]
    for name, parser in tree.items():
        start = f"complete -c delta-sync -n 'string match -q -- \"{name}\" (__delta_sync_command)'"
        lines += [f"{start} -f -a {word}" for word in _operands(parser)]
        for action in _flags(parser):
            # Long flags, and -h.
            flags = " ".join(
                f"-l {flag[2:]}" if flag[:2] == "--" else f"-s {flag[1:]}" for flag in action.option_strings
            )
            value = "" if action.nargs == 0 else " -r"
            if action.choices:
                value = f" -x -a '{' '.join(action.choices)}'"
            lines.append(f"{start} {flags}{value}")
    return "\n".join(lines) + "\n"
