"""``snapshot``: what vLLM's modules and classes hold in this process, to be compared with another process's."""

import hashlib
import os
import sys
import threading
from collections.abc import Mapping
from types import FunctionType, MappingProxyType, MethodType, NoneType
from typing import Any

OURS = ("vllm_delta_sync", "trainer_side")
STACKS = ("vllm.platforms._init_trace",)  # the text of a stack: who asked first


def snapshot() -> dict[str, Any]:
    """Every attribute of vLLM's modules and classes, described; and environment, threads, and modules of ours."""
    modules = {name: module for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"}
    attributes: dict[str, str] = {}
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("__") or f"{name}.{attribute}" in STACKS:
                continue
            attributes[f"{name}.{attribute}"] = _described(value)
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    attributes[f"{name}.{attribute}.{member}"] = _described(inner)
    return {
        "attributes": attributes,
        "environment": {name: hashlib.sha256(value.encode()).hexdigest() for name, value in os.environ.items()},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "ours": sorted(name for name in sys.modules if name.split(".")[0] in OURS),
    }


def _described(value: Any) -> str:
    """Text that is the same in two processes if the value is.

    Only types that are known are looked into: a placeholder of vLLM for a module that is not installed raises on any
    attribute.
    """
    if type(value) in (classmethod, staticmethod, MethodType):
        value = value.__func__
    if type(value) is FunctionType:
        return f"function {value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    if type(value) in (dict, MappingProxyType):
        return f"mapping of {sorted(map(str, value))}"
    if type(value) in (str, bytes, bool, int, float, NoneType):
        return repr(value)
    if issubclass(type(value), type):
        return f"class {value.__module__}.{value.__qualname__}"
    return f"a {type(value).__qualname__}"


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of attributes that are described otherwise, or are in one only."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
