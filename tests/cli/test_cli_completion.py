"""``delta-sync completion``: its script in a real bash, with the words that a user would have typed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import answer, kind, shown
from vllm_delta_sync import cli

ASK = """
COMP_WORDS=("${@}")
COMP_CWORD=$(($# - 1))
# What bash itself calls: the function that `complete` has registered.
function=$(complete -p delta-sync | sed -E 's/.* -F ([^ ]+) .*/\\1/')
$function delta-sync "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
[[ ${#COMPREPLY[@]} -eq 0 ]] || printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "ask"
    file.write_text(shown("completion", "bash") + ASK)
    return file


def completed(script: Path, line: str) -> list[str]:
    """What bash offers for the last word of a line; a space at its end begins a new word."""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, script, *line.split(" ")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.split()


def test_commands(script: Path) -> None:
    parser = cli.build_parser()
    assert completed(script, "delta-sync ") == list(parser.children)
    assert completed(script, "delta-sync ke") == ["keygen"]
    assert completed(script, "delta-sync tag s") == ["set"]
    assert completed(script, "delta-sync --v") == ["--version"]


def test_the_flags_of_every_command(script: Path) -> None:
    for name, parser in cli.build_parser().commands.items():
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        assert completed(script, f"delta-sync {name} --") == flags, name
    # A value does not count as a command, and other words may come before the flag.
    assert completed(script, "delta-sync tag set keygen --bucket log --mi") == ["--milestone"]


def test_values(script: Path) -> None:
    assert completed(script, "delta-sync compact --bucket x --codec ") == ["tiled", "plain"]
    assert completed(script, "delta-sync completion ") == ["bash", "zsh", "fish"]
    # Nothing: bash then completes names of files, as `complete -o default` says.
    for line in ("delta-sync export --to ", "delta-sync keygen ", "delta-sync log --bucket ", "delta-sync inspect ./"):
        assert completed(script, line) == []
    assert "complete -o default -F" in script.read_text()


def test_the_other_shells() -> None:
    """Neither zsh nor fish need be installed: zsh runs the script of bash, and fish gets every command and flag."""
    assert answer("completion", "zsh")["script"].endswith(shown("completion", "bash"))
    assert "bashcompinit" in shown("completion", "zsh")
    lines = shown("completion", "fish").splitlines()
    for name, parser in cli.build_parser().commands.items():
        of_it = [line for line in lines if f'-- "{name}" (' in line]
        for action in parser._actions:
            for flag in action.option_strings:
                if flag.startswith("--"):
                    assert any(f" -l {flag[2:]}" in line for line in of_it), (name, flag)
    assert kind(2, "completion", "tcsh") == "usage"
    assert kind(2, "completion") == "usage"
