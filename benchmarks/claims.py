"""What the benchmarks show, in sentences; ``benchmarks.render`` fills in the figures from the results."""

from dataclasses import dataclass

from benchmarks.common import real_model

Pick = tuple[str, str] | tuple[str, str, str]
"""Case, metric, and the peer of a ratio."""


@dataclass(frozen=True)
class Claim:
    """``figure`` has a ``{}`` for the value of each pick. ``readme``: README shows it too."""

    bench: str
    text: str
    figure: str
    picks: tuple[Pick, ...]
    readme: bool = False


PATCHES = "load_checkpoint_weight_patches"
CLAIMS = (
    Claim(
        "apply",
        "A commit of 1 % of 507 M dense weights, in the pause; vLLM's own patcher; loading all weights from memory",
        "{} ms; {} times; {} times that",
        (
            ("dense 1%", "commit"),
            ("dense 1%", "ratio", PATCHES),
            ("dense 1%", "ratio", "load_weights"),
        ),
        readme=True,
    ),
    Claim(
        "codec",
        f"SmolLM2-135M, {real_model.ORIGIN}, data set *settled*, lr 1e-6: weights that a step changes; "
        "bytes for each of them, packed and context; all weights over packed",
        "{} %; {} B, {} B; {} times",
        (
            ("settled lr 1e-6", "changed share"),
            ("settled lr 1e-6, packed", "size"),
            ("settled lr 1e-6, context", "size"),
            ("settled lr 1e-6, packed", "ratio", "dense bf16"),
        ),
        readme=True,
    ),
    Claim(
        "fleet",
        "A version of 100 M weights is served after, over links of 100 Mbit/s and 50 ms; full weights take",
        "{} s; {} times that",
        (
            ("a version, median", "seconds to fresh"),
            ("seconds to fresh", "ratio", "full weights, stored and fetched"),
        ),
        readme=True,
    ),
    Claim(
        "scaling",
        "Start-up proof of one rank on one core, projected from slices: Llama-3.1-70B, TP 8; DeepSeek-V3, TP 8 × EP 8",
        "{} s; {} s",
        (
            ("projected rank: Llama-3.1-70B, TP 8", "proof"),
            ("projected rank: DeepSeek-V3, TP 8 × EP 8", "proof"),
        ),
    ),
    Claim(
        "breakeven",
        "A delta of 1 % is sooner there than whole weights sent directly over links slower than",
        "{} Gbit/s; projected to 16 cores {}",
        (
            ("dense 1%", "delta beats direct below"),
            ("dense 1%, projected to 16 cores", "delta beats direct below"),
        ),
    ),
    Claim(
        "catchup",
        "Catching up over 1,000 versions by merged deltas; by each delta",
        "{} objects, {} s; {} objects, {} s",
        (
            ("1000 versions, merged deltas", "objects"),
            ("1000 versions, merged deltas", "time"),
            ("1000 versions, each delta", "objects"),
            ("1000 versions, each delta", "time"),
        ),
        readme=True,
    ),
    Claim(
        "publish",
        "`publish` blocks training of 0.5 B parameters; a plain comparison of the same bytes takes; saving them takes",
        "{} ms; {} ms; {} ms",
        tuple(("0.5 B, 1 process, 1 thread: call", name) for name in ("publish", "array_equal", "save_pretrained")),
        readme=True,
    ),
    Claim(
        "publish",
        "A step of 0.1 B parameters takes longer by, with a version at each step (2 threads on 2 cores)",
        "{} ± {} ms of {} ms",
        tuple(("0.1 B, 1 process, 2 threads: loop", name) for name in ("added", "added ±", "step without")),
    ),
    Claim(
        "serving",
        "A busy server loses, at a version every 10 s (3.2 M parameters; 0.3 B)",
        "{} ± {} %; {} ± {} % of its tokens",
        tuple((f"{size}, every 10 s", f"lost, by syncs{half}") for size in ("demo", "0.3B") for half in ("", " ±")),
    ),
    Claim(
        "layout",
        "Plain weights on CPUs, over packed ones: prefill, decoding 1, decoding 16 sequences (dense 0.6 B)",
        "{}, {}, {} of the speed",
        tuple(
            (f"dense 0.6B {work}", "ratio", "vLLM packed weights")
            for work in ("prefill", "decode batch 1", "decode batch 16")
        ),
        readme=True,
    ),
    Claim(
        "notice",
        "A notice arrives after, on one machine: plain; by broker, encrypted and signed",
        "{} ms; {} ms",
        (("direct", "p50"), ("broker, CURVE, signed", "p50")),
    ),
    Claim(
        "stores",
        "Speed of uploads and downloads over that of the store's own client: S3 (boto3), Hub (huggingface_hub)",
        "{} and {}; {} and {}",
        (
            ("s3 up", "ratio", "boto3"),
            ("s3 down", "ratio", "boto3"),
            ("hub up", "ratio", "huggingface_hub"),
            ("hub down", "ratio", "huggingface_hub"),
        ),
    ),
)
