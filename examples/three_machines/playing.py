"""Play games: guesses from the server beside the worker, feedback from the environment's machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.demo.rollouts import Completion, JsonClient, ServerClient, ServerError
from examples.three_machines.game import GUESSES, LETTERS
from examples.three_machines.reading import first_prompt, next_part
from examples.three_machines.telling import Patience
from examples.three_machines.trajectories import Game, Span, Turn

ENVIRONMENT_SECONDS = 15.0
TEMPERATURE = 1.0
"""At which the log-probs that the server reports, of its raw logits, are those it sampled by."""


@dataclass
class Play:
    """A game under way. ``prompt``: token ids that the next guess will see."""

    game: int
    prompt: list[int]
    guesses: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    done: bool = False
    solved: bool = False
    reward: float = 0.0

    def guess(self, completion: Completion) -> None:
        """Take in what the policy wrote."""
        self.turns.append(
            Turn(
                prompt=self.prompt,
                output=completion.tokens,
                logprobs=[min(0.0, value) for value in completion.logprobs],
                spans=spans_of(completion.versions),
            )
        )
        self.guesses.append(completion.text)

    def hear(self, answer: dict[str, Any]) -> None:
        """Take in what the environment said of it. Raises ServerError."""
        try:
            self.done, self.solved = bool(answer["done"]), bool(answer["solved"])
            self.reward = float(answer["reward"])
            self.prompt = self.prompt + self.turns[-1].output + next_part(self.guesses[-1], answer["feedback"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(f"the answer of /guess is {str(answer)[:200]}: {error}", 400) from error

    def finished(self) -> Game:
        """The game for the trainer."""
        return Game(game=self.game, turns=self.turns, solved=self.solved, reward=self.reward)


def spans_of(versions: Sequence[int | None]) -> list[Span]:
    """Runs of equal versions, one per token.

    Raises:
        ServerError: a token has none.
    """
    spans: list[Span] = []
    for place, version in enumerate(versions):
        if version is None:
            raise ServerError("the server has not proven yet which version it serves")
        if spans and spans[-1].version == version:
            spans[-1] = Span(version=version, start=spans[-1].start, end=place + 1)
        else:
            spans.append(Span(version=version, start=place, end=place + 1))
    return spans


class Player:
    """Plays batches of games turn by turn, each turn of all of them in one go."""

    def __init__(self, server: ServerClient, environment: JsonClient, patience: Patience) -> None:
        self._server, self._environment = server, environment
        self._patience = patience

    def play(self, games: Sequence[int], plays: int) -> list[Game]:
        """Each game ``plays`` times, all to their ends.

        Raises:
            ServerError: the server or the environment is away for too long, or refuses.
        """
        numbers = [number for number in games for _ in range(plays)]
        begun = self._ask("/game", [{"game": number} for number in numbers])
        under_way = [
            Play(number, first_prompt(answer["prompt"])) for number, answer in zip(numbers, begun, strict=True)
        ]
        for _ in range(GUESSES):
            open_plays = [play for play in under_way if not play.done]
            if not open_plays:
                break
            self._turn(open_plays)
        return [play.finished() for play in under_way]

    def _turn(self, plays: list[Play]) -> None:
        prompts = [play.prompt for play in plays]
        answers = self._patience.until_done("server", lambda: self._complete(prompts))
        for play, completion in zip(plays, answers, strict=True):
            play.guess(completion)
        asked = [{"game": play.game, "guesses": play.guesses} for play in plays]
        for play, answer in zip(plays, self._ask("/guess", asked), strict=True):
            play.hear(answer)

    def _complete(self, prompts: list[list[int]]) -> list[Completion]:
        found = [group[0] for group in self._server.complete(prompts, 1, LETTERS, TEMPERATURE)]
        for completion in found:
            spans_of(completion.versions)
        return found

    def _ask(self, path: str, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers = self._patience.until_done(
            "environment", lambda: self._environment.request("POST", path, asked, ENVIRONMENT_SECONDS)
        )
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise ServerError(f"the answer of {path} is not a list of {len(asked)}", 400)
        return answers
