"""What the benchmarks show, in sentences; ``benchmarks.render`` fills in the figures from the results."""

from dataclasses import dataclass

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


STEP = "A step of *settled*, lr 1e-6"
PATCHES = "load_checkpoint_weight_patches"
CLAIMS = (
    Claim(
        "apply",
        f"{STEP}: its commit, in the pause",
        "{} % changed; {} ms; vLLM's own patcher takes {} times as long, loading all weights from memory {} times",
        (
            ("SmolLM2, settled, lr 1e-6", "changed share"),
            ("SmolLM2, settled, lr 1e-6", "commit"),
            ("SmolLM2, settled, lr 1e-6", "ratio", PATCHES),
            ("SmolLM2, settled, lr 1e-6", "ratio", "load_weights"),
        ),
        readme=True,
    ),
    Claim(
        "apply",
        "The same with 507 M random dense weights, of which 1 % change",
        "{} ms; {} times as long, {} times",
        (
            ("dense 1%", "commit"),
            ("dense 1%", "ratio", PATCHES),
            ("dense 1%", "ratio", "load_weights"),
        ),
    ),
    Claim(
        "codec",
        f"{STEP}: its size",
        "{} % changed; {} B per changed weight with `tiled`, {} B with `plain`; all weights are {} times the former",
        (
            ("settled lr 1e-6", "changed share"),
            ("settled lr 1e-6, tiled", "size"),
            ("settled lr 1e-6, plain", "size"),
            ("settled lr 1e-6, tiled", "ratio", "dense bf16"),
        ),
        readme=True,
    ),
    Claim(
        "fleet",
        f"{STEP}: from `publish` until it is served, over links of 100 Mbit/s and 50 ms",
        "{} s; full weights take {} times as long",
        (
            ("SmolLM2: a version, median", "seconds to fresh"),
            ("SmolLM2: seconds to fresh", "ratio", "full weights, stored and fetched"),
        ),
        readme=True,
    ),
    Claim(
        "scaling",
        "Start-up proof of one rank on one core, projected from slices",
        "{} s for Llama-3.1-70B, TP 8; {} s for DeepSeek-V3, TP 8 × EP 8",
        (
            ("projected rank: Llama-3.1-70B, TP 8", "proof"),
            ("projected rank: DeepSeek-V3, TP 8 × EP 8", "proof"),
        ),
    ),
    Claim(
        "breakeven",
        "Links below which a delta of 1 % with codec `plain` is sooner there than whole weights sent directly",
        "{} Gbit/s with one core; {} projected to 16 cores",
        (
            ("dense 1%", "delta beats direct below"),
            ("dense 1%, projected to 16 cores", "delta beats direct below"),
        ),
    ),
    Claim(
        "catchup",
        "Catching up over 100 steps of *settled*, lr 1e-6",
        "{} % changed in each; by merged deltas: {} objects, {} MB, {} s; by each delta: {} objects, {} MB, {} s",
        (
            ("settled lr 1e-6: 100 versions", "changed share"),
            *(
                (f"settled lr 1e-6: 100 versions, {way}", metric)
                for way in ("merged deltas", "each delta")
                for metric in ("objects", "read", "time")
            ),
        ),
        readme=True,
    ),
    Claim(
        "publish",
        f"{STEP}: for how long `publish` blocks training",
        "{} % changed; {} ms; a plain comparison of the same bytes takes {} ms, saving them {} ms",
        tuple(
            ("SmolLM2, 1 process, 1 thread: call", name)
            for name in ("changed", "publish", "array_equal", "save_pretrained")
        ),
        readme=True,
    ),
    Claim(
        "serving",
        "Tokens that a busy server loses, at a version every 10 s",
        "{} ± {} % with 3.2 M parameters; {} ± {} % with 0.3 B",
        tuple((f"{size}, every 10 s", f"lost, by syncs{half}") for size in ("demo", "0.3B") for half in ("", " ±")),
    ),
    Claim(
        "layout",
        "Speed of plain weights on CPUs, over that of packed ones (dense 0.6 B)",
        "prefill {}; decoding 1 sequence {}, 16 sequences {}",
        tuple(
            (f"dense 0.6B {work}", "ratio", "vLLM packed weights")
            for work in ("prefill", "decode batch 1", "decode batch 16")
        ),
        readme=True,
    ),
    Claim(
        "notice",
        "Time until a notice arrives, on one machine",
        "{} ms plain; {} ms by broker, encrypted and signed",
        (("direct", "p50"), ("broker, CURVE, signed", "p50")),
    ),
    Claim(
        "stores",
        "Speed of uploads and downloads over that of the store's own client",
        "S3 (boto3): {} and {}; Hub (huggingface_hub): {} and {}",
        (
            ("s3 up", "ratio", "boto3"),
            ("s3 down", "ratio", "boto3"),
            ("hub up", "ratio", "huggingface_hub"),
            ("hub down", "ratio", "huggingface_hub"),
        ),
    ),
)
