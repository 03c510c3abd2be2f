"""The fuzzer's corpus, and some of its inputs; ``make fuzz`` tries many more, with checks of all bounds."""

from tests.tools.fuzz.inputs import read_all, seeds
from tests.tools.fuzz.objects import CORPUS, run


def test_good_objects_of_the_corpus_are_those_that_are_written_today() -> None:
    # If not: python -m tests.tools.fuzz --renew
    assert {f"good-{name}.safetensors": data for name, data in seeds().items()} == {
        path.name: path.read_bytes() for path in CORPUS.glob("good-*")
    }


def test_the_corpus_is_read_or_refused() -> None:
    refusals = [read_all(path.read_bytes()) for path in sorted(CORPUS.glob("refused-*"))]
    assert refusals
    assert all(refusals)


def test_inputs_are_read_or_refused() -> None:
    tried, met = run(800, seed=20)
    assert tried == 800
    assert met > 50
