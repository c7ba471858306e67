"""An engine and an environment whose every move a test decides."""

import asyncio
import threading

import numpy as np

from thundersync_jax.config import RolloutConfig
from thundersync_jax.envs.base import Action, Observation
from thundersync_jax.rollout import render
from thundersync_jax.rollout.engine import Response
from thundersync_jax.types import TrajectoryKey

ANSWER = render.render_action(Action("answer", "7"))
CALL = render.render_action(Action("call", "1+1"))


def limits(**changes) -> RolloutConfig:
    """Generous limits, so that a test hits only the one it sets."""
    values = {
        "slots": 8,
        "context_tokens": 64,
        "turn_tokens": 8,
        "turns": 3,
        "prefill_buckets": (64,),
        "gradient_buckets": (64,),
        "command_timeout_secs": 20.0,
        "trajectory_timeout_secs": 20.0,
        "verify_timeout_secs": 20.0,
        "step_timeout_secs": 20.0,
        "verify_concurrency": 8,
    }
    values.update(changes)
    return RolloutConfig(**values)


def key(member: int = 0, group: int = 0, step: int = 0) -> TrajectoryKey:
    return TrajectoryKey(step, group, member)


class FakeEngine:
    """Answers with what `policy(request, turn)` returns, from one thread at a time."""

    def __init__(self, policy=None, context_tokens=64, policy_version=0):
        self.context_tokens = context_tokens
        self.policy_version = policy_version
        self.requests = []
        self.released = []
        self.threads = set()
        self.peak_sessions = 0
        self._policy = policy or (lambda request, turn: ANSWER)
        self._queue = []
        self._turns = {}

    def submit(self, request):
        self.threads.add(threading.get_ident())
        self.requests.append(request)
        turn = self._turns.get(request.session, -1) + 1
        self._turns[request.session] = turn
        self.peak_sessions = max(self.peak_sessions, len(self._turns))
        self._queue.append((request, turn))

    def step(self):
        self.threads.add(threading.get_ident())
        queue, self._queue = self._queue, []
        return [self._answer(request, turn) for request, turn in queue]

    def release(self, session):
        self.threads.add(threading.get_ident())
        self.released.append(session)
        self._turns.pop(session, None)
        self._queue = [entry for entry in self._queue if entry[0].session != session]

    @property
    def busy(self):
        return bool(self._queue)

    def update(self, params, policy_version):
        self.threads.add(threading.get_ident())
        assert not self._turns, "every session must have been released"
        self.policy_version = policy_version

    def _answer(self, request, turn):
        ids = np.asarray(self._policy(request, turn), np.int32)
        return Response(
            session=request.session,
            ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            stopped=bool(ids[-1] in request.stop_ids),
            policy_version=self.policy_version,
        )


class FakeEnvironment:
    """Prompt "2+5", tool reply "2", done at an answer, reward 1; parts are replaced."""

    def __init__(self, prompt="2+5", reply="2", reward=1.0, start=None, step=None):
        self.actions = []
        self._prompt = prompt
        self._reply = reply
        self._reward = reward
        self._start = start
        self._step = step

    async def start(self, task):
        if self._start is not None:
            await self._start()
        return self._prompt

    async def step(self, action):
        self.actions.append(action)
        if self._step is not None:
            await self._step()
        return Observation(self._reply, done=action.kind == "answer")

    async def verify(self):
        return await self._reward() if callable(self._reward) else self._reward


async def never():
    await asyncio.sleep(3600)


async def refuse():
    raise ConnectionError("refused\nby a peer")
