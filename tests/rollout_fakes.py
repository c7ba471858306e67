"""An engine and an environment whose every move a test decides, and a pool of them."""

import asyncio
import contextlib
import threading

import numpy as np

from thundersync_jax.chat import byte_level
from thundersync_jax.config import RolloutConfig
from thundersync_jax.engines.base import Response, Scored
from thundersync_jax.envs.base import Action, Observation
from thundersync_jax.rollout.events import Completed, Failed, Job, Rewarded
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey

ANSWER = byte_level.render_action(Action("answer", "7"))
CALL = byte_level.render_action(Action("call", "1+1"))
PATIENCE_SECS = 20.0  # for an event that must come; never waited for in full


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
            stopped=bool(
                ids[-1] in request.stop_ids
                or (request.stop_texts and request.stop_texts.end(ids))
            ),
            policy_version=self.policy_version,
        )


class FakeTeacher:
    """Gives every token a number of its own, `teacher_logprobs`.

    `before(tokens, number)` is awaited first, `number` counting a session's requests.
    """

    def __init__(self, before=None):
        self.asked = []
        self.released = []
        self.closed = False
        self._before = before
        self._numbers = {}

    async def logprobs(self, session, tokens, positions):
        number = self._numbers.get(session, -1) + 1
        self._numbers[session] = number
        self.asked.append((session, tokens.tolist(), positions.tolist()))
        if self._before is not None:
            await self._before(tokens, number)
        return Scored(teacher_logprobs(tokens)[positions], None)

    def release(self, session):
        self.released.append(session)

    def close(self, timeout_secs):
        self.closed = True
        return True


def teacher_logprobs(tokens):
    """float32[T, 1]; another number for every token, place and length."""
    return -(tokens + np.arange(len(tokens)) / 64 + len(tokens) / 8192).astype(
        np.float32
    )[:, None]


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


def after(secs, value):
    async def wait():
        await asyncio.sleep(secs)
        return value

    return wait


def jobs(count, step=0, first=0):
    members = range(first, first + count)
    return [Job(key(member, step=step), member) for member in members]


@contextlib.contextmanager
def open_pool(
    environment=None,
    engine=None,
    on_span=None,
    blocked_secs=10.0,
    make_teacher=None,
    keep=None,
    **changes,
):
    """A pool whose member m of group 0 gets `environment(m)`."""
    environment = environment or (lambda member: FakeEnvironment())
    with RolloutPool(
        engine or FakeEngine(),
        lambda context: environment(context.key.member),
        limits(**changes),
        seed=3,
        on_span=on_span,
        blocked_secs=blocked_secs,
        make_teacher=make_teacher,
        keep=keep,
    ) as pool:
        yield pool
    assert pool._driver.close(0.0), "what the pool closed has not ended"


def drain(pool):
    """Returns all events up to the last outcome."""
    events = []
    while pool.outstanding:
        event = pool.next_event(PATIENCE_SECS)
        assert event is not None, f"{pool.outstanding} members say nothing"
        events.append(event)
    return events


def roll(pool, count, step=0, policy_version=0):
    pool.start(jobs(count, step), policy_version)
    return drain(pool)


def outcomes(events):
    """Returns the outcome of every member; there may be only one."""
    found = {}
    for event in events:
        if isinstance(event, Rewarded | Failed):
            assert event.key.member not in found
            found[event.key.member] = event
    return found


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


class ScriptedPool:
    """Tells of members in a random order, and at once.

    `rewards[group][member]` is the verdict, None of a member that fails. Every second
    failure comes after the tokens are final.
    """

    def __init__(self, rewards, rng):
        self.ended = False
        self.arrivals = []
        self._rewards = rewards
        self._rng = rng
        self._open = []
        self._completed = set()

    @property
    def outstanding(self):
        return len(self._open)

    def start(self, jobs, policy_version):
        assert not self._open
        self._completed.clear()
        self.add(jobs, policy_version)

    def add(self, jobs, policy_version):
        self._open += [job.key for job in jobs]

    def next_event(self, timeout_secs):
        index = int(self._rng.integers(len(self._open)))
        key = self._open[index]
        reward = self._rewards[key.group][key.member]
        trajectory = trajectory_of(key, reward)
        fails = reward is None and key.member % 2 == 0
        if key not in self._completed and not fails:
            self._completed.add(key)
            return Completed(key, trajectory)
        del self._open[index]
        self.arrivals.append(key)
        if reward is None:
            return Failed(key, StopReason.TIMEOUT, "too slow")
        return Rewarded(key, reward, trajectory)

    def close(self):
        self._open.clear()


def trajectory_of(key, reward, tokens=None):
    """A trajectory with 1 prompt token and 1 to 3 sampled ones."""
    tokens = tokens or 1 + (key.group + key.member) % 3
    return Trajectory(
        key=key,
        ids=np.arange(tokens + 1, dtype=np.int32),
        loss_mask=np.arange(tokens + 1) > 0,
        logprobs=np.zeros(tokens + 1, np.float32),
        turns=1,
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        reward=reward,
    )
