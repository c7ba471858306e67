"""What one agent's very long tool output costs the other agents.

    python tests/long_answers.py --megabytes=10

One of eight agents gets so many megabytes from its tool, in a conversation of 4,096
tokens in a Qwen form. The seven others sleep for 5 ms again and again: how late they
wake up is what the long text costs them, beside a run in which nobody gets one.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import chat_folders
import numpy as np
from rollout_fakes import FakeEngine, FakeEnvironment, drain, jobs, limits, outcomes

from thundersync_jax.chat.templates import TemplateChat
from thundersync_jax.envs.base import Action, Observation
from thundersync_jax.rollout.pool import RolloutPool

SLEEP_SECS, SLEEPS = 0.005, 100


def measure(chat, text, setting):
    """Milliseconds [7 * SLEEPS] by which the others woke up late; the outcomes."""
    late_ms = []

    class Environment(FakeEnvironment):
        def __init__(self, member):
            super().__init__()
            self.member = member

        async def step(self, action):
            if self.member == 0:
                return Observation(text, role="tool")
            for _ in range(SLEEPS):
                start = time.monotonic()
                await asyncio.sleep(SLEEP_SECS)
                late_ms.append(1e3 * (time.monotonic() - start - SLEEP_SECS))
            return Observation(done=True)

    answer = chat.action(Action("answer", "7"))
    settings = limits(
        context_tokens=4096,
        turn_tokens=64,
        turns=2,
        stop_ids=None,
        prefill_buckets=(4096,),
        gradient_buckets=(4096,),
        long_observations=setting,
    )
    engine = FakeEngine(lambda request, turn: answer, context_tokens=4096)
    with RolloutPool(
        engine, lambda context: Environment(context.key.member), settings, 0, chat=chat
    ) as pool:
        pool.start(jobs(8), 0)
        found = outcomes(drain(pool))
    return np.array(late_ms), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=10.0)
    options = parser.parse_args()
    line = "line of output 123\n"
    text = line * int(options.megabytes * 1e6 / len(line))
    with tempfile.TemporaryDirectory() as folder:
        chat = TemplateChat(chat_folders.write(Path(folder) / "q", "qwen3"))
        print(f"{'text':>12}  {'setting':<8}  {'median':>9}  {'largest':>9}  culprit")
        for shown, setting in ((line, "overflow"), (text, "overflow"), (text, "cut")):
            late_ms, found = measure(chat, shown, setting)
            culprit = found[0].trajectory
            end = culprit.stop_reason.value
            print(
                f"{len(shown):>12,}  {setting:<8}  {np.median(late_ms):>6.1f} ms  "
                f"{late_ms.max():>6.1f} ms  {end}, {len(culprit.ids)} tokens"
            )


if __name__ == "__main__":
    main()
