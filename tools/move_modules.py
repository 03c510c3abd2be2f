"""Move modules and rename classes as a map says, with every mention of them: ``python tools/move_modules.py [MAP]``.

``git mv`` keeps the history. In Python files the imports are rewritten by their syntax; everywhere else (documents,
configuration, strings in code) dotted names and paths are replaced as text. A class is renamed in its module, wherever
it is imported by its name or reached through its module, and in ``literals`` of comments, docstrings and documents
where the old name is no other class's. Running it again does nothing, so the step can be repeated on other work: merge,
run it, commit.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "tools" / "moves.json"
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ".cfg", ".ini", ".Dockerfile", ""}
DONE = "\0"
"""In front of a module's name that needs no more rewriting."""
UNTOUCHED = ("tools/", "CHANGELOG.md", "LICENSE")


def main(arguments: list[str]) -> int:
    """Apply the map of the first argument, or the committed one."""
    document = json.loads(Path(arguments[0] if arguments else DEFAULT).read_text())
    moves: dict[str, str] = document["moves"]
    names: dict[str, dict[str, str]] = document["names"]
    tracked = _git("ls-files").splitlines()
    for old, new in moves.items():
        if old in tracked:
            _move(old, new)
    modules = {_dotted(old): _dotted(new) for old, new in moves.items()}
    texts = _replacer(modules, moves)
    for name in _git("ls-files").splitlines():
        path = ROOT / name
        if name.startswith(UNTOUCHED) or path.suffix not in TEXT or path.is_symlink() or not path.is_file():
            continue
        try:
            before = path.read_text()
        except UnicodeDecodeError:
            continue
        after = _imports(before, modules) if path.suffix == ".py" else before
        after = texts(after)
        if path.suffix == ".py":
            after = _renamed(after, _dotted(name), names)
            if name.startswith(("vllm_delta_sync/", "trainer_side/")):
                after = _direct(after, set(document["direct"]))
        after = _literals(after, names)
        if after != before:
            path.write_text(after)
    return 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _move(old: str, new: str) -> None:
    folder = (ROOT / new).parent
    folder.mkdir(parents=True, exist_ok=True)
    _git("mv", old, new)
    while folder != ROOT and not (folder / "__init__.py").exists() and not new.endswith("__init__.py"):
        (folder / "__init__.py").write_text("")
        _git("add", str(folder / "__init__.py"))
        folder = folder.parent


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _replacer(modules: Mapping[str, str], moves: Mapping[str, str]):  # type: ignore[no-untyped-def]
    """Replaces dotted names and paths in text, the longest first."""
    table = {**modules, **moves}
    children: dict[str, list[str]] = {}
    for new in modules.values():
        package, _, child = new.rpartition(".")
        children.setdefault(package, []).append(child)

    def form(name: str) -> str:
        # Some packages are called as a module was: what follows tells which of the two is meant.
        after = rf"(?!\.(?:{'|'.join(children[name])})\b)" if name in modules and name in children else ""
        return re.escape(name) + after

    names = "|".join(form(name) for name in sorted(table, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w./{DONE}-])({names})(?![\w])(?!\.py\b)")

    def replace(text: str) -> str:
        return pattern.sub(lambda match: table[match[1]], text).replace(DONE, "")

    return replace


def _imports(source: str, modules: Mapping[str, str]) -> str:
    """Rewrite ``from package import module`` where the module is moved, and the uses of its name."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    edits: list[tuple[int, int, str]] = []
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(_bound(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        if node.module not in modules and not any(f"{node.module}.{alias.name}" in modules for alias in node.names):
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        if any(f"{node.module}.{alias.name}" in modules.values() for alias in node.names):
            # Rewritten already, by a name that is a package now and was a module before.
            edits.append((start, end, data[start:end].decode().replace(node.module, DONE + node.module, 1)))
            continue
        groups: dict[str, list[str]] = {}
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            known = alias.asname
            if full not in modules:
                groups.setdefault(modules.get(node.module, node.module), []).append(
                    alias.name + (f" as {known}" if known else "")
                )
                continue
            package, _, name = modules[full].rpartition(".")
            if known is None and name != alias.name:
                uses = list(_uses(tree, alias.name, starts))
                # Within an f-string Python 3.11 does not know where a name stands.
                found = all(data[start:end] == alias.name.encode() for start, end in uses)
                if name in taken or alias.name in _stored(tree) or not found:
                    known = alias.name
                else:
                    edits += [(start, end, name) for start, end in uses]
            groups.setdefault(package, []).append(name + (f" as {known}" if known and known != name else ""))
        indent = " " * node.col_offset
        new = f"\n{indent}".join(f"from {DONE}{package} import {', '.join(names)}" for package, names in groups.items())
        edits.append((start, end, new))
    for start, end, new in sorted(set(edits), reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def _renamed(source: str, module: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Rename classes where a file defines them, imports them by name, or reaches them through their module."""
    tree = ast.parse(source)
    local: dict[str, str] = {}
    through: dict[tuple[str, str], str] = {}
    imported: dict[tuple[str, str], str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known = names.get(node.module, {})
                if alias.name in known:
                    imported[node.module, alias.name] = known[alias.name]
                    if alias.asname in (None, alias.name):
                        local[alias.name] = known[alias.name]
                bound = alias.asname or alias.name
                for old, new in names.get(f"{node.module}.{alias.name}", {}).items():
                    through[bound, old] = new
        elif isinstance(node, ast.ClassDef) and node.name in names.get(module, {}):
            local[node.name] = names[module][node.name]
    # An alias of a type, such as ``Way = list[...]``, is an assignment.
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in names.get(module, {}):
                    local[target.id] = names[module][target.id]
    if not local and not through and not imported:
        return source
    lines = source.splitlines(keepends=True)
    out: list[tuple[int, int, int, str]] = []
    before: list[tokenize.TokenInfo] = []
    statement: str | None = None
    words = (
        re.compile(r"\b(" + "|".join(map(re.escape, sorted(local, key=len, reverse=True))) + r")\b") if local else None
    )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT):
            continue
        if token.type == tokenize.NEWLINE:
            before, statement = [], None
            continue
        texts = [item.string for item in before[-3:]]
        if token.string == "import" and before and before[0].string == "from":
            statement = "".join(item.string for item in before[1:])
        row, column = token.start
        if token.type == tokenize.NAME:
            new = None
            if statement is not None and (statement, token.string) in imported:
                # An alias of the same name hands it on; another one stays.
                new = imported[statement, token.string]
            elif texts[-1:] != ["."] and token.string in local and statement is None:
                new = local[token.string]
            elif texts[-1:] == ["."] and texts[-3:-2] != ["."] and (texts[-2], token.string) in through:
                new = through[texts[-2], token.string]
            if new is not None:
                out.append((row, column, len(token.string), new))
        elif token.type == tokenize.STRING and words is not None and row == token.end[0]:
            # Types in quotes, and what an f-string evaluates.
            body = token.string
            if body[:1] in "fF" or re.fullmatch(r"""["'][\w\[\], .|]+["']""", body):
                braces = body[:1] in "fF"
                changed = (
                    re.sub(r"\{[^{}]*\}", lambda match: words.sub(lambda word: local[word[1]], match[0]), body)
                    if braces
                    else words.sub(lambda word: local[word[1]], body)
                )
                if changed != body and (braces or _is_type(tree, row, column)):
                    out.append((row, column, len(body), changed))
        before.append(token)
    for row, column, length, new in sorted(out, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + length :]
    return "".join(lines)


def _direct(source: str, aliases: set[str]) -> str:
    """Import what is used of a module by its own name, where the module itself was imported under an alias."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(_bound(tree))
    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or len(node.names) != 1 or node.names[0].asname not in aliases:
            continue
        alias = node.names[0]
        uses = [
            use
            for use in ast.walk(tree)
            if isinstance(use, ast.Attribute) and isinstance(use.value, ast.Name) and use.value.id == alias.asname
        ]
        places = [starts[use.value.lineno - 1] + use.value.col_offset for use in uses]
        head = f"{alias.asname}.".encode()
        wanted = sorted({use.attr for use in uses})
        others = sum(isinstance(use, ast.Name) and use.id == alias.asname for use in ast.walk(tree)) != len(uses)
        clear = all(data[place : place + len(head)] == head for place in places)
        imported = {
            known.name
            for other in ast.walk(tree)
            if isinstance(other, ast.ImportFrom) and other.module == f"{node.module}.{alias.name}"
            for known in other.names
            if known.asname is None
        }
        if others or not clear or not wanted or (set(wanted) - imported) & taken:
            sys.stderr.write(f"{alias.asname} stays: {sorted((set(wanted) - imported) & taken)}\n")
            continue
        edits += [(place, place + len(head), "") for place in places]
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        edits.append((start, end, f"from {node.module}.{alias.name} import {', '.join(wanted)}"))
    for start, end, new in sorted(set(edits), reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def _is_type(tree: ast.AST, row: int, column: int) -> bool:
    """Whether a string is written where a type is, or a name that a module hands out."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.List):
            # An alias of a type, or ``__all__``.
            parts = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
            parts = list(node.args[:1])
        for part in parts:
            for child in ast.walk(part) if part is not None else ():
                if isinstance(child, ast.Constant) and (child.lineno, child.col_offset) == (row, column):
                    return True
    return False


def _literals(text: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Rename classes in ``literals`` of prose, where no two classes had the name."""
    count: dict[str, list[str]] = {}
    for known in names.values():
        for old, new in known.items():
            count.setdefault(old, []).append(new)
    single = {old: new[0] for old, new in count.items() if len(new) == 1 and len(old) > 5}
    if not single:
        return text
    words = "|".join(map(re.escape, sorted(single, key=len, reverse=True)))
    return re.sub(rf"(?<=`)({words})(?=[`.(])", lambda match: single[match[1]], text)


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]


def _stored(tree: ast.AST) -> set[str]:
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return stored | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _uses(tree: ast.AST, name: str, starts: list[int]) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            start = starts[node.lineno - 1] + node.col_offset
            yield start, start + len(name.encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
