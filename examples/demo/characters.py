"""The characters the policy knows and their token ids; without any library, for the orchestrator too."""

from examples.demo import task

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, task.SEPARATOR, *task.ALPHABET, *task.ALPHABET.upper(), *"01234567")
IDS = {entry: number for number, entry in enumerate(VOCABULARY)}
PAD_ID, EOS_ID = IDS[PAD], IDS[EOS]


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character, exactly as the tokenizer of the checkpoint gives them."""
    return [IDS.get(character, IDS[UNKNOWN]) for character in text]
