"""The word game: feedback, rewards, secrets, and how it reads to the policy."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from examples.demo.characters import IDS, UNKNOWN, encode
from examples.three_machines import game
from examples.three_machines.policy import transcript
from examples.three_machines.reading import first_prompt, next_part


@pytest.mark.parametrize(
    ("secret", "guess", "signs"),
    [
        ("tea", "tea", "ggg"),
        ("tea", "ate", "yyy"),
        ("tea", "ton", "g--"),
        ("tea", "ear", "yy-"),
        # A letter counts as often as the secret has it, in its place first.
        ("tea", "tet", "gg-"),
        ("tot", "tat", "g-g"),
        ("tot", "ott", "yyg"),
        ("eta", "eee", "g--"),
        ("tea", "aaa", "--g"),
        # What is no guess of three letters solves nothing.
        ("tea", "te", "gg-"),
        ("tea", "", "---"),
        ("tea", "teas", "---"),
        ("tea", "TEA", "---"),
    ],
)
def test_feedback(secret: str, guess: str, signs: str) -> None:
    assert game.feedback(secret, guess) == signs


def test_a_word_is_solved_by_itself_alone_and_signs_count_common_letters() -> None:
    for secret in game.WORDS:
        for guess in game.WORDS:
            signs = game.feedback(secret, guess)
            assert (signs == game.SOLVED) == (secret == guess)
            common = (Counter(secret) & Counter(guess)).total()
            assert signs.count(game.HIT) + signs.count(game.NEAR) == common
            assert signs.count(game.HIT) == sum(a == b for a, b in zip(secret, guess, strict=True))


def test_rewards_fall_with_each_guess_and_any_solved_game_earns_more_than_any_other() -> None:
    solved = [game.reward(["---"] * before + [game.SOLVED]) for before in range(game.GUESSES)]
    assert solved == pytest.approx([1.0, 0.9, 0.8, 0.7])
    assert game.reward(["---", "g-g", "g--", "---"]) == pytest.approx(0.2)
    assert game.reward(["yyy"] * game.GUESSES) == 0.0
    assert game.is_done(["---", game.SOLVED])
    assert not game.is_done(["---"] * (game.GUESSES - 1))
    assert game.is_done(["---"] * game.GUESSES)


def test_secrets_follow_from_seed_and_number_and_are_spread_over_all_words() -> None:
    found = [game.secret_of(5, number) for number in range(4000)]
    assert found == [game.secret_of(5, number) for number in range(4000)]
    assert found != [game.secret_of(6, number) for number in range(4000)]
    counts = Counter(found)
    assert set(counts) == set(game.WORDS)
    assert max(counts.values()) < 2 * 4000 / len(game.WORDS)


def test_the_policy_reads_letter_and_sign_as_one_token_and_knows_all_of_them() -> None:
    assert next_part("ear", "gy-") == encode("Ea0>")
    assert next_part("e", "---") == encode("000>")
    assert next_part("<x", "y--") == [IDS[UNKNOWN], *encode("00>")]
    for word in game.WORDS:
        assert IDS[UNKNOWN] not in encode(word) + next_part(word, "ggg") + next_part(word, "yyy")


def test_transcripts_are_games_whose_prompts_go_on_and_that_end_when_solved() -> None:
    rng = random.Random(1)
    for _ in range(200):
        turns = transcript(rng)
        assert 1 <= len(turns) <= game.GUESSES
        assert turns[0][0] == first_prompt(">")
        for (prompt, output), (later, _) in pairwise(turns):
            assert later[: len(prompt) + len(output)] == prompt + output
