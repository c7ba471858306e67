"""Arithmetic with a calculator: questions and verdicts of the reasoning-gym library.

The policy may call the tool in any number of turns and then answers in plain text. The
reward is the library's own `score_answer`, partial credit included.

Source: Stojanovski et al., Reasoning Gym, arXiv 2505.24760.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from thundersync_jax.config import EnvConfig
from thundersync_jax.config.checks import bounds, installed
from thundersync_jax.config.settings import check_types
from thundersync_jax.envs import calculator
from thundersync_jax.envs.base import Action, Observation, TaskSet
from thundersync_jax.errors import ConfigError

TASKS = ("chain_sum", "products", "gcd")
_CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates one arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / ( ) and gcd(a, b), as in 12*(3+4)",
                }
            },
            "required": ["expression"],
        },
    },
}
_SYSTEM = "Answer with the number alone."
_SYSTEM_WITH_TOOL = "Compute with the calculator, then answer with the number alone."
_DRAWS_PER_QUESTION = 100  # before a space of questions counts as exhausted
_HELDOUT_ONE_IN = 8  # of all texts


@dataclasses.dataclass(frozen=True)
class ReasoningOptions:
    """Which questions there are and how they are put."""

    tasks: tuple[str, ...] = ("chain_sum",)  # of TASKS, in equal shares
    terms: tuple[int, ...] = (2, 4)  # fewest and most numbers of a question
    digits: tuple[int, ...] = (1, 3)  # fewest and most digits of a number
    train_tasks: int = 4096  # training questions as the library draws them
    heldout_tasks: int = 512  # different held-out questions, the same for every seed
    tool: Literal["calculator", "none"] = "calculator"
    prompt: Literal["compact", "question"] = "compact"  # "12+7-3", or a sentence

    def __post_init__(self):
        check_types(self, "env.options.")
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(
                f"env.options.tasks is {self.tasks}; expected different names among "
                f"{', '.join(TASKS)}."
            )
        bounds(self, "env.options.", {"terms": 2, "digits": 1})
        if self.terms[1] * (self.digits[1] + 1) > calculator.MAX_DIGITS:
            raise ConfigError(
                f"env.options.terms {self.terms} and digits {self.digits} exceed the "
                f"calculator's {calculator.MAX_DIGITS} digits; ask for fewer."
            )
        for name in ("train_tasks", "heldout_tasks"):
            if getattr(self, name) < len(self.tasks):
                raise ConfigError(
                    f"env.options.{name} is {getattr(self, name)}; expected at least "
                    f"one question for each of {len(self.tasks)} tasks."
                )


@dataclasses.dataclass(frozen=True)
class Question:
    """One task."""

    task: str  # the library's name of the data set it comes from
    prompt: str  # what the policy reads
    expression: str  # what the calculator takes to solve it
    # The library's record, the right answer included; for its scorer only.
    entry: dict[str, Any] = dataclasses.field(hash=False, repr=False)


class ReasoningEnvironment:
    """One attempt at one question."""

    def __init__(self, datasets: dict[str, Any], tool: str):
        self._datasets = datasets
        self._tool = tool
        self._question: Question | None = None
        self._answer: str | None = None

    async def start(self, task: Question) -> str:
        self._question = task
        return task.prompt

    async def step(self, action: Action) -> Observation:
        if action.kind == "call":
            return Observation(self._call(action.text))
        self._answer = action.text if action.kind == "answer" else ""
        return Observation(done=True)

    async def verify(self) -> float:
        dataset = self._datasets[self._question.task]
        return float(dataset.score_answer(self._answer, self._question.entry))

    def _call(self, text: str) -> str:
        if self._tool == "none":
            return "error: no tool"
        try:
            return calculator.evaluate(text)
        except calculator.CalculatorError as error:
            return f"error: {error}"


def make(env: EnvConfig, seed: int) -> TaskSet:
    """Returns the tasks of `env.options` (ReasoningOptions, None for its defaults).

    One text in eight is held out, by its hash: neither seeds nor counts can leak one
    into training, and all runs are evaluated on the same questions. Held-out questions
    are all different.

    Raises:
      ConfigError: The library is missing, or there are too few different questions.
    """
    options = ReasoningOptions() if env.options is None else env.options
    datasets = {name: _dataset(options, name) for name in options.tasks}
    tool = options.tool == "calculator"
    return TaskSet(
        train=_draw(options, datasets, options.train_tasks, f"train {seed}"),
        heldout=_draw(options, datasets, options.heldout_tasks, "heldout"),
        environment=lambda: ReasoningEnvironment(datasets, options.tool),
        prompt=lambda question: question.prompt,
        demonstrate=_demonstrate if tool else _answer,
        tools=(_CALCULATOR,) if tool else (),
        system=_SYSTEM_WITH_TOOL if tool else _SYSTEM,
    )


def _demonstrate(question: Question) -> Sequence[tuple[Action, str]]:
    ((answer, end),) = _answer(question)
    return [(Action("call", question.expression), answer.text), (answer, end)]


def _answer(question: Question) -> Sequence[tuple[Action, str]]:
    return [(Action("answer", calculator.evaluate(question.expression)), "")]


def _dataset(options: ReasoningOptions, name: str) -> Any:
    user = f"tasks of env.factory {__name__}:make"
    reasoning_gym = installed("reasoning_gym", user, "tasks")
    (few, many), (short, long) = options.terms, options.digits
    sizes = {"min_terms": few, "max_terms": many}
    sizes |= {"min_digits": short, "max_digits": long}
    if name == "gcd":
        sizes = {"min_numbers": few, "max_numbers": many}
        sizes |= {"min_value": 10 ** (short - 1), "max_value": 10**long - 1}
    return reasoning_gym.create_dataset(name, seed=0, **sizes)


def _draw(
    options: ReasoningOptions, datasets: dict[str, Any], wanted: int, stream: str
) -> list[Question]:
    """Returns `wanted` questions of one side, their tasks taking turns."""
    heldout = stream == "heldout"
    columns = []
    for place, (name, dataset) in enumerate(datasets.items()):
        share = len(range(place, wanted, len(datasets)))
        column: dict[Any, Question] = {}
        for draw, question in enumerate(_stream(options, name, dataset, stream, share)):
            if _is_heldout(question) == heldout:
                # Held-out questions count once; training repeats what the library does.
                column.setdefault(question.prompt if heldout else draw, question)
            if len(column) == share:
                break
        else:
            raise ConfigError(
                f"env.options asks for {share} {stream.split()[0]} questions of "
                f"{name}, but terms {options.terms} and digits {options.digits} gave "
                f"{len(column)} in {_DRAWS_PER_QUESTION * share} draws; allow more "
                "terms or digits, or ask for fewer questions."
            )
        columns.append(column.values())
    rows = itertools.zip_longest(*columns)
    return [question for row in rows for question in row if question is not None]


def _is_heldout(question: Question) -> bool:
    digest = hashlib.sha256(question.expression.encode()).digest()
    return digest[0] < 256 // _HELDOUT_ONE_IN


def _stream(
    options: ReasoningOptions, name: str, dataset: Any, stream: str, share: int
) -> Iterator[Question]:
    # The library seeds entry i with seed + i: neighbouring seeds would share entries.
    digest = hashlib.sha256(f"{stream} {name}".encode()).digest()
    start = int.from_bytes(digest[:8], "big")
    for place in range(_DRAWS_PER_QUESTION * share):
        entry = dataset[start + place]
        if name == "gcd":
            numbers = ",".join(map(str, entry["metadata"]["numbers"]))
            expression = f"gcd({numbers})"
        else:
            expression = entry["metadata"]["expression"].replace(" ", "")
        compact = options.prompt == "compact"
        yield Question(
            name, expression if compact else entry["question"], expression, entry
        )
