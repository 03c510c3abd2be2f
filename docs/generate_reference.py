"""Generate docs/REFERENCE.md and docs/guarantees.md: ``python docs/generate_reference.py``; ``--check`` only compares.

Names, types, defaults and numbers of the reference are read from the code. The meaning of fields of JSON documents
stands in reference_tables.py, and tests/docs/test_docs.py compares their keys with documents that a real receiver
made. The guarantees are the table of suites in tests/README.md.
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from reference_tables import RESULT_SECONDS, SPAN_FIELDS, STATUS_FIELDS, TIMINGS, VERIFY_FIELDS

import trainer_side.checkpoint_folders
import trainer_side.integrations.peft
import trainer_side.integrations.transformers
import trainer_side.integrations.trl
import trainer_side.options
import trainer_side.publisher
import trainer_side.ranks.given_parts
import trainer_side.result
import vllm_delta_sync.client
import vllm_delta_sync.engine.api.embedded
import vllm_delta_sync.fleet.fleet
import vllm_delta_sync.maintenance.follow
import vllm_delta_sync.maintenance.follow_folder
import vllm_delta_sync.run.run_reader
import vllm_delta_sync.trust.keyring
import vllm_delta_sync.verify.report
from vllm_delta_sync import admin_token, cli, errors
from vllm_delta_sync import settings as config
from vllm_delta_sync.engine import WORKER_EXTENSION
from vllm_delta_sync.engine.api import access
from vllm_delta_sync.engine.api import routes as http
from vllm_delta_sync.engine.api.admission import SESSION_PATHS, VERSIONED_PATHS, LateError, UnreachableError
from vllm_delta_sync.engine.api.exact_requests import MIN_VERSION_HEADER, VERSION_HEADER, VersionError
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.observe.states import STATES

ROOT = Path(__file__).parents[1]

BOUNDS = (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))


def main(arguments: Sequence[str]) -> int:
    """Write both files, or with ``--check`` say (exit status 1) which one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is out of date")
    options = parser.parse_args(arguments)
    outdated = 0
    for name, text in {"REFERENCE.md": reference(), "guarantees.md": guarantees()}.items():
        target = Path(__file__).with_name(name)
        if not options.check:
            target.write_text(text)
        elif not target.exists() or target.read_text() != text:
            sys.stderr.write(f"{name} is out of date; run: python docs/{Path(__file__).name}\n")
            outdated = 1
    return outdated


def reference() -> str:
    """The whole document."""
    parts = [
        "# Reference",
        f"Generated from the code by `docs/{Path(__file__).name}`; do not edit it. [FORMAT.md](FORMAT.md) specifies "
        f"the "
        "bytes in a bucket.",
        "Contents: [settings](#settings) · [commands](#commands) · [HTTP](#http) · [states](#states) · "
        "[timings](#timings) · [errors](#errors) · [Python](#python) · [vLLM versions](#vllm-versions) · "
        "[limits](#limits)",
        *settings(),
        *commands(),
        *routes(),
        *states(),
        *kinds(),
        *python(),
        *versions(),
    ]
    return "\n\n".join(parts) + "\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def fields(rows: dict[str, str]) -> str:
    """A table of JSON members."""
    return table(("member", "meaning"), [(f"`{name}`", text) for name, text in rows.items()])


def code(value: object) -> str:
    return f"`{value}`"


# Settings


def settings() -> Iterator[str]:
    yield "## Settings"
    yield (
        "Every program reads them: `delta-sync serve`, `vllm serve` with the plugin, `attach`, all other commands, and "
        "the library. A flag or an argument overrides the environment, which overrides the TOML file that "
        f"`{config.CONFIG_VARIABLE}` names (keys as in the first column). An unknown name is an error, and so is an "
        f"unknown variable that starts with `{config.ENV_PREFIX}`. Servers read the settings once, at start."
    )
    yield (
        "A server uses all of them except `signing_key`. A command uses `bucket`, `trusted_keys`, `signing_key` and "
        "the settings of the store's client (`store_…`); of the commands, only `serve`, `follow` and `publish` use "
        "`mirror` and `peer`. Commands that call a server, such as `hold`, use only `admin_token_file`. "
        "`open_run(url)` uses `trusted_keys` and the store's settings unless it is given `keyring` or `store`; "
        "`Publisher` uses `signing_key`, `trusted_keys`, `log_format` and the store's; `open_bucket(url)` the store's. "
        "Settings that a program does not use are checked too. An empty variable is an error, except for the bucket, "
        "the store and the cache, where it counts as unset."
    )
    required = config.Settings.model_json_schema()["required"]
    rows = []
    for name, entry in {
        **config.Settings.model_json_schema()["properties"],
        "signing_key": config.ClientSettings.model_json_schema()["properties"]["signing_key"],
    }.items():
        default = "required by a server" if name in required else shown_default(entry.get("default"))
        meaning = " ".join(entry["description"].split())
        rows.append((code(name), code(config.environment_name(name)), shape_of(entry), default, meaning))
    yield table(("name", "environment", "value", "default", "meaning"), rows)
    yield (
        "numba reads `NUMBA_CACHE_DIR`, a writable directory for compiled code. Set it only where neither the "
        "installed "
        "package nor the user's cache directory is writable; otherwise each process there compiles again."
    )


def shown_default(value: object) -> str:
    if isinstance(value, bool):
        return code(str(value).lower())
    return "none" if value is None else code(value)


def shape_of(entry: dict[str, Any]) -> str:
    """A JSON schema's type, in words."""
    for option in entry.get("anyOf", ()):
        if option.get("type") != "null":
            return shape_of(option)
    if "enum" in entry:
        return ", ".join(code(value) for value in entry["enum"])
    if entry.get("format") == "path":
        return "path"
    if "pattern" in entry:
        return f"text like {code(entry['pattern'])}"
    bounds = [f"{sign} {entry[key]:g}" for key, sign in BOUNDS if key in entry]
    names = {"string": "text", "number": "number", "integer": "integer", "boolean": "`true`, `false`"}
    return ", ".join([names[entry["type"]], *bounds])


# Commands


def commands() -> Iterator[str]:
    yield "## Commands"
    yield (
        'Commands print text for people, or with `--json` one line, `{"ok": true, "command": "log", "data": {…}}`. If '
        '`ok` is false, `error` is `{"kind", "message"}`, and `data` is there if the command has found something: '
        "`log` of a damaged run lists what it could read. `ok` of the last line is true exactly if the exit code is 0, "
        "unless a signal ended the command. "
        "`command` is null if the command line could not be parsed."
    )
    yield (
        "A command that runs until it is interrupted prints such a line for each event: `publish --watch` and `follow` "
        "for each version, `broker` and `dashboard` once, with their addresses, `mirror` also for each object that it "
        "fetches, and at its end. If an error ends it, that is the last line. With `--once`, `publish` and `follow` "
        "print one line with all versions. With `--json`, the output of the command of `--on-update` is "
        "on standard error."
    )
    yield (
        "A version is named by number, `head`, `head~2` (two before the head) or `tag:NAME`. Durations are in seconds, "
        "or have a unit: `500ms`, `90s`, `15m`, `2h`, `7d`; sizes are in bytes, or have a unit: `500MB`, `8GiB`. "
        "Settings take these units too. Progress bars are shown on terminals only, and no command prints colours."
    )
    yield (
        "Exit codes: 0 done, 1 a check failed or data were refused, 2 usage, "
        f"3 not found, 4 store or network, 5 another writer, {cli.INTERRUPTED} interrupted, {cli.CLOSED_PIPE} whatever "
        f"reads the output of a command that goes on has closed it, {cli.TERMINATED} ended by SIGTERM. They follow "
        "from the error's [kind](#errors), except that an error found by a check is always 1: a run, version or tag "
        "that you named and that does not "
        "exist is 3; an object or manifest missing from a run is 1. "
        "`--help` of a command lists what its exit code 1 means."
    )
    for name, command in cli.build_parser().commands.items():
        yield f"### delta-sync {name}"
        yield str(command.description)
        if name == "serve":
            yield (
                "MODEL comes first. Each [setting](#settings) is a flag: `poll_seconds` is `--poll-seconds`. All other "
                "arguments, and everything after `--`, are passed to `vllm serve` unchanged. The server warns if its "
                "vLLM has a flag with the name of one of ours. The command sets `VLLM_PLUGINS` and "
                f"`--worker-extension-cls {WORKER_EXTENSION}`."
            )
        yield table(
            ("argument", "meaning"),
            [
                (argument(action), str(action.help))
                for action in command._actions
                if action.dest != "help" and not (name == "serve" and action.dest in config.Settings.model_fields)
            ],
        )


def argument(action: argparse.Action) -> str:
    names = ", ".join(code(name) for name in action.option_strings)
    if not names:
        return code(action.metavar)
    return f"{names} {action.metavar}" if action.metavar else names


# HTTP


def routes() -> Iterator[str]:
    yield "## HTTP"
    yield (
        "All routes are on vLLM's own port. Those marked *admin* change state. With an admin token "
        "(`admin_token_file`, "
        f"or the environment variable `{admin_token.VARIABLE}`) they require `Authorization: Bearer TOKEN`. Without "
        f"one "
        "they accept only clients on the same machine: a loopback address, a `Host` that is `localhost` or a loopback "
        "address, HTTP/1.1, and none of the headers that a proxy adds. A proxy on this machine that adds no such "
        "header would let everyone in, so set a token if there is one. Requests with an `Origin` header, or whose "
        "`Sec-Fetch-Site` names another site, are always refused, and bodies are JSON of at most "
        f"{access.MAX_BODY_BYTES // 1024} KiB. Routes that only read require nothing and show no credentials; "
        f"at most {http.MAX_WAITING} clients `wait` at a time, not counting those who may change state. Wrong tokens "
        "are not rate-limited: guessing a random token is hopeless, and a limit could lock the operator out. vLLM's "
        "`--api-key` does not cover these routes."
    )
    rows = []
    for route in http.router.routes:
        if isinstance(route, APIRoute):
            method = ", ".join(sorted(route.methods))
            admin = "" if route.methods <= set(access.READING) else "admin"
            text = " ".join((inspect.getdoc(route.endpoint) or "").split())
            rows.append((f"`{method} {route.path}`", parameters(route.endpoint), admin, text))
    yield table(("route", "parameters", "", "answer"), rows)
    yield "`GET /delta_sync/status` (and `sync`, and `wait`) answer with:"
    yield fields(STATUS_FIELDS)
    yield "`POST /delta_sync/verify` answers with:"
    yield fields(VERIFY_FIELDS)
    yield "### Answers of the model"
    yield (
        "These routes of vLLM carry the response header `X-Delta-Sync-Version`, the version served when the request "
        "was admitted (no header before the weights are identified):"
    )
    yield ", ".join(code(path) for path in VERSIONED_PATHS) + "."
    yield (
        "With the request header `X-Delta-Sync-Min-Version: N` they wait until version N or a later one is served, "
        "for at most `min_version_seconds`. With `X-Delta-Sync-Version: N` the whole answer is of version N, or it is "
        f"an error; not on {', '.join(code(path) for path in SESSION_PATHS)} ([freshness.md](freshness.md))."
    )
    yield (
        "The bodies of `/v1/completions` and `/v1/chat/completions`, and the last chunk before `[DONE]` of their "
        "streams, have a member `delta_sync`, `{run, spans}`; a choice during which the weights changed has several "
        "spans:"
    )
    yield fields(SPAN_FIELDS)
    yield "Beam search and other routes have no spans."
    yield "### Status codes"
    longest = f"A `timeout` is at most {http.LONGEST_WAIT_SECONDS:g} s."
    yield 'Errors of this plugin are `{"error": {"kind", "message"}}`. ' + longest
    answers = [
        ("200", "done"),
        ("408", "`wait`: not served in time; the body is the status"),
        ("400", "kind `usage`: a parameter or the body is invalid"),
        ("408, 413, 415", "kind `usage`: the body arrives too slowly, is too large, or is not JSON"),
        (
            "401, 403",
            f"`{access.AdminRefused.kind}`: the client may not change state, or the request comes from a page of "
            f"another site",
        ),
        ("400", f"kind `usage`: `{MIN_VERSION_HEADER}` or `{VERSION_HEADER}` is not a version, or not supported there"),
        ("409", f"`{VersionError.kind}`: `{VERSION_HEADER}` is not the version served, or a commit ended the request"),
        ("409", f"`{UnreachableError.kind}`: the version will not be served without an operator's action"),
        ("503", f"`{LateError.kind}`: `{MIN_VERSION_HEADER}` is not served in time; retry after `Retry-After`"),
        ("503", "kind `busy`: too many clients wait; retry after `Retry-After`"),
        ("503", "`ready`: not ready"),
    ]
    by_code: dict[int, list[str]] = {}
    for cls, status in access.STATUS_CODES:
        by_code.setdefault(status, []).append(kinds_below(cls, apart=(VersionError, UnreachableError, LateError)))
    answers += [(str(status), "kind " + ", ".join(names)) for status, names in by_code.items()]
    refused = "any other kind: the bucket's data was refused; the weights did not change"
    answers.append((str(access.REFUSED_DATA), refused))
    yield table(("code", "when"), answers)


def parameters(endpoint: Callable[..., Any]) -> str:
    """Query parameters and members of the body, with defaults."""
    found = []
    for parameter in inspect.signature(endpoint).parameters.values():
        if parameter.name == "body":
            fields = body_of(parameter.annotation).model_fields.items()
            found += [f"body `{name}`{'' if field.is_required() else ', optional'}" for name, field in fields]
        elif parameter.annotation is not Request:
            required = parameter.default is inspect.Parameter.empty
            found.append(code(parameter.name) + ("" if required else f" = {parameter.default:g}"))
    return ", ".join(found)


def body_of(annotation: Any) -> type[BaseModel]:
    """The model of a body that may be left out or not."""
    parts = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type)]
    return next(part for part in parts if issubclass(part, BaseModel))


# States, timings, errors


def states() -> Iterator[str]:
    yield "## States"
    yield table(("state", "meaning"), [(code(name), text) for name, text in STATES.items()])
    yield "## Timings"
    yield (
        "Milliseconds, in `timings_ms`. Generation continues during all up to `rescan`, and is paused during the rest."
    )
    yield table(("key", "meaning"), [(code(name), text) for name, text in TIMINGS.items()])


def kinds() -> Iterator[str]:
    yield "## Errors"
    yield (
        "All are `vllm_delta_sync.DeltaSyncError`; programs match on `kind`, which does not change between releases. "
        "The message names the field, the value and the remedy. *Exit* is the exit code of `delta-sync`."
    )
    yield (
        f"Two bases tell a handler what to do. `vllm_delta_sync.errors.DataError` ({kinds_below(errors.DataError)}): "
        "trying again does not help, other data may. `vllm_delta_sync.errors.StoreError` "
        f"({kinds_below(errors.StoreError)}): this says nothing about the data, try again later."
    )
    rows = [
        (code(cls.kind), code(cls.__name__), str(cls.exit_code), " ".join((inspect.getdoc(cls) or "").split()))
        for cls in sorted(declaring_kinds(), key=lambda cls: cls.kind)
        if cls is not errors.DeltaSyncError
    ]
    yield table(("kind", "class", "exit", "meaning"), rows)


def kinds_below(base: type[errors.DeltaSyncError], apart: tuple[type[errors.DeltaSyncError], ...] = ()) -> str:
    """Of a class and its subclasses, without those that are shown apart."""
    found = (cls for cls in declaring_kinds() if issubclass(cls, base) and not issubclass(cls, apart))
    return ", ".join(sorted(code(cls.kind) for cls in found))


def declaring_kinds() -> Iterator[type[errors.DeltaSyncError]]:
    """Yield the classes that declare their own kind."""
    pending = [errors.DeltaSyncError]
    while pending:
        cls = pending.pop()
        if "kind" in vars(cls):
            yield cls
        pending.extend(cls.__subclasses__())


# Python


def python() -> Iterator[str]:
    yield "## Python"
    yield f"### `from trainer_side import {', '.join(trainer_side.__all__)}`"
    yield "Needs torch, not vLLM; only `DeltaSyncCallback` needs transformers."
    yield stub(trainer_side.options, "Gate")
    yield stub(trainer_side.options, "Budget")
    yield stub(trainer_side.publisher, "Publisher")
    yield stub(trainer_side.options, "PublisherOptions")
    yield stub(trainer_side.ranks.given_parts, "Part")
    yield stub(trainer_side.result, "PublishResult")
    yield "`PublishResult.seconds` has the keys:"
    yield table(("key", "meaning"), [(code(name), text) for name, text in RESULT_SECONDS.items()])
    yield stub(trainer_side.result, "PublisherStatus")
    yield stub(trainer_side.integrations.transformers, "DeltaSyncCallback")
    yield "### `from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher`"
    yield "Needs torch, not vLLM."
    for name in ("CheckpointPublisher", "CheckpointWatcher", "CheckpointFolder", "PublishedCheckpoint"):
        yield stub(trainer_side.checkpoint_folders, name)
    yield "### `from trainer_side.integrations.trl import DeltaWeightTransfer`"
    yield stub(trainer_side.integrations.trl, "DeltaWeightTransfer")
    yield "### `from trainer_side.integrations.peft import adapter_publisher`"
    yield stub(trainer_side.integrations.peft, "adapter_publisher")
    yield "### `from vllm_delta_sync import open_run`"
    yield "Needs neither vLLM nor a trainer; only `Run.tensors` and `Run.load_into` need torch."
    for name in ("open_run", "Run"):
        yield stub(vllm_delta_sync.client, name)
    yield stub(vllm_delta_sync.run.run_reader, "RunReader")
    yield stub(vllm_delta_sync.fleet.fleet, "Fleet")
    yield stub(vllm_delta_sync.fleet.fleet, "Replica")
    yield stub(vllm_delta_sync.verify.report, "VerifyReport")
    yield "### `from vllm_delta_sync import follow`"
    yield stub(vllm_delta_sync.maintenance.follow, "follow")
    yield stub(vllm_delta_sync.maintenance.follow_folder, "FollowedVersion")
    yield "### `from vllm_delta_sync.trust import Keyring`"
    yield stub(vllm_delta_sync.trust.keyring, "Keyring")
    yield "### `from vllm_delta_sync.engine import WORKER_EXTENSION, attach, attach_async`"
    yield f"`WORKER_EXTENSION` is `{WORKER_EXTENSION!r}`, for `LLM(..., worker_extension_cls=WORKER_EXTENSION)`."
    for name in ("attach", "OfflineSync"):
        yield stub(vllm_delta_sync.engine.api.embedded, name)
    for name in ("attach_async", "AsyncSync"):
        yield stub(vllm_delta_sync.engine.api.embedded, name)


def stub(module: Any, name: str) -> str:
    """Signatures and docstrings of a public function or class, as Python."""
    tree = ast.parse(inspect.getsource(module))
    node = next(node for node in tree.body if getattr(node, "name", None) == name)
    lines = list(class_lines(node)) if isinstance(node, ast.ClassDef) else list(function_lines(node))
    return "```python\n" + "\n".join(lines) + "\n```"


def class_lines(node: ast.ClassDef) -> Iterator[str]:
    yield f"class {node.name}:"
    yield from docstring(node, "    ")
    if any("config=CHECKED" in ast.unparse(decorator) for decorator in node.decorator_list):
        yield ""
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and not re.search("init=False|ClassVar", ast.unparse(member)):
                yield f"    {ast.unparse(WithoutChecks().visit(member))}".replace("'", '"')
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and is_public(member):
            yield ""
            yield from (f"    {line}" if line else "" for line in function_lines(member))


class WithoutChecks(ast.NodeTransformer):
    """Leaves the plain type of what pydantic checks."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=ast.Name(id="SkipValidation" | "InstanceOf"), slice=inner):
                return inner
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
                return inner
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        plain = {"Count": "int", "Share": "float", "Ratio": "float", "Switch": "bool"}
        return ast.Name(plain.get(node.id, node.id))


def is_public(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return bool(ast.get_docstring(node)) if node.name == "__init__" else not node.name.startswith("_")


def function_lines(node: Any) -> Iterator[str]:
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        yield "@property"
    given = list(split_arguments(node.args))
    result = f" -> {ast.unparse(node.returns).strip(chr(39))}" if node.returns else ""
    end = f"{result}:" if ast.get_docstring(node) else f"{result}: ..."
    define = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    whole = f"{define} {node.name}({', '.join(given)}){end}"
    if len(whole) <= 100:
        yield whole
    else:
        yield f"{define} {node.name}("
        yield from (f"    {part}," for part in given)
        yield f"){end}"
    yield from docstring(node, "    ")


def split_arguments(arguments: ast.arguments) -> Iterator[str]:
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for given, default in zip(arguments.args, defaults, strict=True):
        # ``takes_options``
        yield "**options: Unpack[PublisherOptions]" if given.arg == "make_options" else parameter(given, default)
    if arguments.vararg is not None:
        yield f"*{parameter(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(parameter, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg is not None:
        yield f"**{parameter(arguments.kwarg)}"


def parameter(given: ast.arg, default: ast.expr | None = None) -> str:
    text = given.arg if given.annotation is None else f"{given.arg}: {ast.unparse(given.annotation)}"
    return (text if default is None else f"{text} = {ast.unparse(default)}").replace("'", '"')


def docstring(node: Any, indent: str) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield from textwrap.indent(f'"""{text}' + ('\n"""' if "\n" in text else '"""'), indent).split("\n")


# Versions


def versions() -> Iterator[str]:
    yield "## vLLM versions"
    tested = ", ".join(patches.TESTED_VERSIONS)
    yield (
        f"Tested with vLLM {tested} on CPUs ([support.md](support.md)). A server with another release logs a warning "
        f"and "
        "starts. Code that depends on vLLM's internals is in `vllm_delta_sync/engine/compat/`, with cause, symptom, "
        "and when it can be removed."
    )
    yield "## Limits"
    yield "What a reader accepts: [FORMAT.md, section 15](FORMAT.md#15-limits)."


# Guarantees


def guarantees() -> str:
    """The page of guarantees: the table of tests/README.md with commands in place of suites."""
    text = (ROOT / "tests" / "README.md").read_text()
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text.partition("| guarantee | suite |")[2].partition("\n\n")[0], re.M)
    parts = [
        "# Guarantees and their proofs",
        "What the other pages promise, and the command that proves it in a checkout, once `make lint` has made "
        "`.venv`. `make test` runs most of these suites, `make test-full` all of them, with more examples. Suites in "
        "`tests/e2e` start real vLLM servers. `make test-gpu` needs a GPU, and `make test-page` Chromium.",
        f"Generated from [tests/README.md](../tests/README.md) by `docs/{Path(__file__).name}`; do not edit it.",
        table(("guarantee", "command"), ((promise, proof(suites)) for promise, suites in rows)),
    ]
    return "\n\n".join(parts) + "\n"


def proof(suites: str) -> str:
    """The commands for the suites of a row: pytest for files and folders, and targets of make."""
    names = re.findall(r"`([^`]+)`", suites)
    targets = [code(name) for name in names if name.startswith("make ")]
    files = []
    for name in names:
        if not name.startswith("make "):
            found = sorted(ROOT.glob(f"tests/{name}"))
            if not found:
                raise SystemExit(f"tests/README.md names {name}, which is not in tests/")
            files += [f"{path.relative_to(ROOT)}" for path in found]
    pytest = [code(f".venv/bin/python -m pytest {' '.join(files)}")] if files else []
    return ", ".join([*pytest, *targets])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
