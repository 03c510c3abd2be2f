"""Nothing that is sent or stored is ever run: no module of ours has the means to."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("vllm_delta_sync", "trainer_side") for path in (ROOT / folder).rglob("*.py"))
MODULES = {
    "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "jsonpickle",
    "pickletools", "copyreg", "dbm", "xmlrpc", "code", "codeop", "runpy",
}  # fmt: skip
NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
METHODS = {
    ("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("np", "save"), ("np", "fromfile"),
    ("yaml", "load"), ("os", "system"), ("os", "popen"), ("multiprocessing", "Pipe"), ("pd", "read_pickle"),
    ("jit", "load"), ("package", "PackageImporter"), ("socket", "recv_pyobj"),
}  # fmt: skip
ATTRIBUTES = {"send_pyobj", "recv_pyobj", "set_default_serializer", "load_module"}
RPC = {"collective_rpc", "call_utility_async", "_call_utility_async", "call_utility", "apply_model"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""


def offences(tree: ast.AST) -> Iterator[str]:
    """What a module does that no module here may."""
    texts = {call: names for function in ast.walk(tree) for call, names in texts_in(function)}
    for node in ast.walk(tree):
        where = getattr(node, "lineno", 0)
        for name in imports(node):
            if name.split(".")[0] in MODULES:
                yield f"{where}: imports {name}"
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield f"{where}: {node.attr}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        owner, _, method = name.rpartition(".")
        if name in NAMES or (owner in ("builtins", "__builtins__") and method in NAMES):
            yield f"{where}: calls {name}"
        if (owner.split(".")[-1], method) in METHODS:
            yield f"{where}: calls {name}"
        for argument in node.keywords:
            is_true = not (isinstance(argument.value, ast.Constant) and argument.value.value is False)
            if argument.arg in ("allow_pickle", "trust_remote_code", "shell") and is_true:
                yield f"{where}: {name}({argument.arg}=…)"
        if method in RPC:
            yield from (f"{where}: {problem}" for problem in in_rpc(node, texts.get(node, set())))


def texts_in(function: ast.AST) -> Iterator[tuple[ast.Call, set[str]]]:
    """Calls in a function, and its parameters that are declared as strings, which the type checker holds it to."""
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        declared = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = {each.arg for each in declared if isinstance(each.annotation, ast.Name) and each.annotation.id == "str"}
        yield from ((node, names) for node in ast.walk(function) if isinstance(node, ast.Call))


def in_rpc(call: ast.Call, texts: set[str]) -> Iterator[str]:
    """Methods of vLLM's processes are named by strings: a callable would be sent as a pickle of its code."""
    first = call.args[0] if call.args else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    is_text = is_text or (isinstance(first, ast.Name) and first.id in texts)
    if not is_text and not (isinstance(first, ast.Name | ast.Attribute) and dotted(first).endswith("METHOD")):
        yield f"{dotted(call.func)} is not called with the name of a method"
    for node in ast.walk(call):
        if isinstance(node, ast.Lambda):
            yield f"{dotted(call.func)} is given a lambda"


def test_no_module_runs_what_is_sent_or_stored() -> None:
    found = [f"{path.relative_to(ROOT)}:{text}" for path in SOURCES for text in offences(ast.parse(path.read_text()))]
    assert found == []
    assert len(SOURCES) > 100
    text = "\n".join(path.read_text() for path in SOURCES)
    assert sum(text.count(f".{name}(") for name in RPC) >= 3


OFFENCES = """import pickle
from cloudpickle import dumps
import shelve as s
import marshal, os
eval('1')
exec(text)
compile(text, '', 'exec')
__import__(name)
torch.load(path)
torch.load(path, weights_only=True)
np.load(path)
np.lib.format.read_array(f, allow_pickle=True)
subprocess.run(command, shell=True)
os.system('x')
yaml.load(text)
client.collective_rpc(lambda worker: 1)
client.collective_rpc(function)
client.collective_rpc('m', args=(lambda: 1,))
socket.send_pyobj(x)
AutoModel.from_pretrained(x, trust_remote_code=True)"""


def test_the_scan_sees() -> None:
    for text in OFFENCES.splitlines():
        assert list(offences(ast.parse(text))), text


def test_what_is_sent_to_ranks_is_plain() -> None:
    """The one method that ranks are asked for is a name, and it takes bytes and a number."""
    from vllm_delta_sync.engine.core import executors
    from vllm_delta_sync.engine.worker import worker_extension as worker

    assert isinstance(executors.RANK_METHOD, str)
    extension = next(
        cls for cls in vars(worker).values() if isinstance(cls, type) and hasattr(cls, executors.RANK_METHOD)
    )
    assert callable(getattr(extension, executors.RANK_METHOD))
