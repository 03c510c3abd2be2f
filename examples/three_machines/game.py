"""The word game: guess a secret of three letters in at most four guesses, told after each how close it was.

A game is a number. Its secret follows from the service's seed and that number alone, so whoever rates guesses keeps
nothing between two of them. Without any library, for every machine.
"""

import random
from collections.abc import Sequence

LETTERS = 3
GUESSES = 4
WORDS = (
    *("ant", "are", "ate", "ear", "eat", "net", "not", "oat"),
    *("one", "ore", "rat", "rot", "sea", "tan", "ten", "toe"),
)
HIT, NEAR, MISS = "g", "y", "-"
SOLVED = HIT * LETTERS
LATER_GUESS = 0.1
"""What each guess after the first takes from the reward of a game that is solved."""
PLACED_LETTER = 0.1
"""What a letter in its place earns in a game that is not."""


def secret_of(seed: int, game: int) -> str:
    """The word to be found in a game; every word is equally likely."""
    return random.Random(f"{seed} {game}").choice(WORDS)


def feedback(secret: str, guess: str) -> str:
    """One sign per letter of the secret: ``g`` right, ``y`` elsewhere in the secret, ``-`` not, or not once more.

    A guess of another length is compared as far as it goes, and never solves the game.
    """
    signs = [MISS] * LETTERS
    guess = guess[:LETTERS] if len(guess) <= LETTERS else ""
    left = []
    for place, letter in enumerate(secret):
        if place < len(guess) and guess[place] == letter:
            signs[place] = HIT
        else:
            left.append(letter)
    for place, letter in enumerate(guess):
        if signs[place] == MISS and letter in left:
            signs[place] = NEAR
            left.remove(letter)
    return "".join(signs)


def is_done(signs: Sequence[str]) -> bool:
    """Whether a game is over after these feedbacks: solved, or no guess left."""
    return len(signs) >= GUESSES or SOLVED in signs


def reward(signs: Sequence[str]) -> float:
    """What a game earned: 1.0, 0.9, 0.8 or 0.7 if solved, else 0.1 for each letter in place at its best guess."""
    if SOLVED in signs:
        return 1.0 - LATER_GUESS * signs.index(SOLVED)
    return PLACED_LETTER * max((found.count(HIT) for found in signs), default=0)
