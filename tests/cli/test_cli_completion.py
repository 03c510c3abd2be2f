"""``delta-sync completion``: its script in a real bash, with the words that a user would have typed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import answer, kind, shown
from vllm_delta_sync import cli

ASK = """
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
# What bash itself calls: the function that `complete` has registered.
function=$(complete -p delta-sync | sed -E 's/.* -F ([^ ]+) .*/\\1/')
$function
[[ ${#COMPREPLY[@]} -eq 0 ]] || printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    command = folder / "delta-sync"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm_delta_sync.cli "$@"\n')
    command.chmod(0o755)
    file = folder / "ask"
    file.write_text(shown("completion", "bash") + ASK)
    return file


def completed(script: Path, line: str) -> list[str]:
    """What bash offers for the last word of a line; a space at its end begins a new word."""
    bash = shutil.which("bash")
    assert bash is not None
    environment = {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, script, *line.split(" ")], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.split()


def words(line: str) -> list[str]:
    """What the scripts ask for."""
    return shown("completion", "words", f"delta-sync {line}").split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", list(cli.build_parser().children)),
        ("keyg", ["keygen"]),
        ("fleet wa", ["wait", "watch"]),
        ("--v", ["--version"]),
        # A value does not count as a command, and other words may come before the flag.
        ("tag set keygen --bucket log --mi", ["--milestone"]),
        ("compact --bucket x --codec ", ["tiled", "plain"]),
        ("completion ", ["bash", "zsh", "fish"]),
        # Nothing: bash then completes names of files, as `complete -o default` says.
        *((line, []) for line in ("export --to ", "keygen ", "log --bucket ", "inspect ./")),
    ],
)
def test_words(script: Path, line: str, expected: list[str]) -> None:
    assert completed(script, f"delta-sync {line}") == words(line) == expected


def test_the_flags_of_every_command() -> None:
    for name, parser in cli.build_parser().commands.items():
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        assert words(f"{name} --") == flags, name


def test_the_scripts() -> None:
    """Neither zsh nor fish need be installed: zsh runs the script of bash, and fish asks for the same words."""
    bash, zsh, fish = (answer("completion", shell)["script"] for shell in ("bash", "zsh", "fish"))
    assert "complete -o default -F" in bash
    assert zsh.endswith(bash)
    assert "bashcompinit" in zsh
    assert "delta-sync completion words (commandline -cp" in fish
    assert kind(2, "completion", "tcsh") == "usage"
    assert kind(2, "completion") == "usage"
