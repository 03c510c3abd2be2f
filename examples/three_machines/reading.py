"""How a game reads to the policy, in the characters that it knows; without any library, for the worker too."""

from examples.demo.characters import encode
from examples.three_machines.environment import PROMPT
from examples.three_machines.game import HIT, MISS, NEAR

ABSENT = "0"


def first_prompt(prompt: str) -> list[int]:
    """Token ids that the policy sees before its first guess."""
    return encode(prompt)


def next_part(guess: str, feedback: str) -> list[int]:
    """Token ids that follow a guess: its letters marked by the feedback, and the call for the next one.

    ``ear`` with ``gy-`` reads ``Ea0``: in place, elsewhere, absent. One token tells letter and sign.
    """
    marked = (_marked(letter, sign) for letter, sign in zip(guess.ljust(len(feedback), ABSENT), feedback, strict=False))
    return encode("".join(marked) + PROMPT)


def _marked(letter: str, sign: str) -> str:
    return {HIT: letter.upper(), NEAR: letter, MISS: ABSENT}[sign]
