"""A task and a model small enough for tests: reverse a word with a tool that does it.

Also a config file: `--config=tests/echo_task.py`. After its short warm start the policy
ends its turns and is right now and then, so that most groups have unequal rewards.
"""

import collections
import dataclasses
import itertools
import random
import threading

from thundersync_jax import config as settings
from thundersync_jax.config.settings import replace
from thundersync_jax.envs.base import Action, Observation, TaskSet

LETTERS, LENGTH = "abcdef", 3


class Echo:
    """One attempt at one word."""

    def __init__(self):
        self.word, self.answer = "", ""

    async def start(self, task: str) -> str:
        self.word = task
        return task

    async def step(self, action: Action) -> Observation:
        if action.kind == "call":
            return Observation(action.text[:LENGTH][::-1])
        self.answer = action.text if action.kind == "answer" else ""
        return Observation(done=True)

    async def verify(self) -> float:
        """The share of letters in place."""
        pairs = itertools.zip_longest(self.answer, reversed(self.word))
        right = [got == wanted for got, wanted in pairs]
        return sum(right) / len(right)


def tasks(environment=Echo, train: int | None = None) -> TaskSet:
    """All words but 32, or so many of them, for training."""
    words = ["".join(w) for w in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(0).shuffle(words)
    return TaskSet(
        train=words[32:][:train],
        heldout=words[:32],
        environment=environment,
        prompt=lambda word: word,
        demonstrate=lambda word: [
            (Action("call", word), word[::-1]),
            (Action("answer", word[::-1]), ""),
        ],
    )


def make(env: settings.EnvConfig, seed: int) -> TaskSet:
    return tasks()


def get_config(variant: str | None = None) -> settings.Config:
    waits = settings.LatencyConfig("lognormal", median_secs=0.01, sigma=1.0)
    return settings.Config(
        steps=12,
        release="batch",
        env=settings.EnvConfig(
            factory=f"{__name__}:make", tool_latency=waits, verify_latency=waits
        ),
        model=settings.ModelConfig(
            layers=1, width=16, mlp_width=32, heads=2, kv_heads=1, head_dim=8
        ),
        optim=settings.OptimConfig(learning_rate=1e-2),
        rollout=settings.RolloutConfig(
            groups_per_step=4,
            group_size=4,
            slots=8,
            decode_steps_per_call=4,
            context_tokens=24,
            turn_tokens=6,
            turns=2,
            prefill_buckets=(8, 24),
            gradient_buckets=(16, 24),
        ),
        mesh=settings.MeshConfig(rows_per_call=2),
        warm_start=settings.WarmStartConfig(
            steps=40,
            batch_size=16,
            learning_rate=2e-2,
            target_success=1.0,
            check_every_steps=5,
            check_questions=16,
        ),
        evaluation=settings.EvaluationConfig(questions=32, every_steps=2),
        checkpoint=settings.CheckpointConfig(every_steps=2),
    )


def small(warm_start_steps: int = 40, **changes) -> settings.Config:
    """The same without waits, and with one program per job: compiled in a second."""
    none = settings.LatencyConfig()
    return replace(
        get_config(),
        {
            "env.tool_latency": none,
            "env.verify_latency": none,
            "rollout.temperature": 0.7,
            "rollout.prefill_buckets": (24,),
            "rollout.gradient_buckets": (24,),
            "mesh.rows_per_call": 2,
            "warm_start.steps": warm_start_steps,
            "warm_start.learning_rate": 3e-2,
            "warm_start.check_every_steps": 40,
            "warm_start.check_questions": 4,
            "evaluation.questions": 4,
        }
        | changes,
    )


# A policy that nobody trained before never ends a turn, and is never asked again: runs
# with scripted verdicts need no more.
SCRIPTED = small(
    warm_start_steps=0,
    **{
        "steps": 1,
        "loss.advantage": "mean_only",
        "rollout.group_size": 4,
    },
)


def scripted(rewards, words=None):
    """Tasks whose members get these verdicts in their order, over and over.

    Args:
      rewards: One list for all words, or one per word. A function is called and
        awaited, an exception raised.
      words: The training tasks.
    """
    asked = collections.Counter()

    class Scripted(Echo):
        async def start(self, task):
            here = rewards.get(task, [0.0]) if isinstance(rewards, dict) else rewards
            self.reward = here[asked[task] % len(here)]
            asked[task] += 1
            return await super().start(task)

        async def verify(self):
            if isinstance(self.reward, Exception):
                raise self.reward
            return await self.reward() if callable(self.reward) else self.reward

    def make(env, seed):
        found = tasks(Scripted)
        return dataclasses.replace(found, train=words or found.train)

    return make


def threads() -> set[threading.Thread]:
    """Those that run, without feeders of other libraries' queues."""
    running = threading.enumerate()
    return {one for one in running if not one.name.startswith("QueueFeederThread")}
