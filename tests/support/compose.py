"""Read the files in docker/: services of a compose file with variables put in as compose does, and YAML documents."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

FOLDER = Path(__file__).parents[2] / "docker"
_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?:(?P<operator>:?-)(?P<default>[^}]*))?\})")


@dataclass(frozen=True)
class Service:
    """A service that runs an image.

    Attributes:
        image: its name. dockerfile: what builds it, below the repository; None for an image of somebody else's.
        entrypoint, command: None where the image's own counts.
        environment: variables that are set; those that are passed through and not given are left out.
        ports: as published, ``127.0.0.1:8001:8000``.
    """

    name: str
    image: str
    dockerfile: str | None
    entrypoint: list[str] | None
    command: list[str] | None
    environment: dict[str, str]
    ports: list[str]


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file, anchors and merges resolved."""
    return list(YAML(typ="safe", pure=True).load_all(path))


def services(path: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """The services of one compose file by name.

    Args:
        variables: what the shell would have.

    Raises:
        ValueError: a command is no list.
    """
    (document,) = documents(path)
    return {name: _service(name, entry, variables) for name, entry in document["services"].items()}


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Put variables in: ``${A}``, ``${A-default where unset}``, ``${A:-default where unset or empty}``, ``$$``."""

    def value(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        given = variables.get(found["name"])
        if given is None or (not given and found["operator"] == ":-"):
            return found["default"] or ""
        return given

    return _VARIABLE.sub(value, text)


def _service(name: str, entry: Mapping[str, Any], variables: Mapping[str, str]) -> Service:
    environment = {
        key: variables.get(key) if value is None else interpolate(value, variables)
        for key, value in entry.get("environment", {}).items()
    }
    return Service(
        name=name,
        image=entry["image"],
        dockerfile=entry.get("build", {}).get("dockerfile"),
        entrypoint=_words(entry.get("entrypoint"), variables),
        command=_words(entry.get("command"), variables),
        environment={key: value for key, value in environment.items() if value is not None},
        ports=entry.get("ports", []),
    )


def _words(value: object, variables: Mapping[str, str]) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list of words; write one, as a shell would split it")
    return [interpolate(str(word), variables) for word in value]
