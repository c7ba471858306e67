"""Attempts with random faults, deadlines and cancellations, and what is left of them.

    python tests/attempt_stress.py --attempts=10000 --seed=0

Every environment is closed exactly once, none is alive at the end, never more than the
bound are, every member has one outcome, every failure its cause, and no thread stays.
"""

import argparse
import random
import threading
import time

from rollout_fakes import (
    FakeEnvironment,
    after,
    drain,
    jobs,
    never,
    of_kind,
    open_pool,
    outcomes,
    refuse,
)

from thundersync_jax.rollout.events import Failed

BOUND = 9  # environments alive at a time


class Counted(FakeEnvironment):
    """Counts itself among those alive, from `start` to `close`."""

    made, alive, most, closing, closed = 0, 0, 0, 0, 0

    def __init__(self, close=None, **moves):
        super().__init__(**moves)
        self._close = close
        self.closed_times = 0
        count = type(self)
        count.made += 1
        count.alive += 1
        count.most = max(count.most, count.alive)

    async def close(self):
        self.closed_times += 1
        assert self.closed_times == 1, "closed twice"
        type(self).closing += 1
        if self._close is not None:
            await self._close()
        type(self).alive -= 1
        type(self).closed += 1


def stress(environment, rng, batches, members):
    def move(*choices):
        kind = rng.choice((None, None, None, *choices))
        if kind is None:
            return None
        secs = rng.uniform(0, 0.02)
        return {"slow": after(secs, None), "fault": refuse, "never": never}[kind]

    def make(member):
        if rng.random() < 0.05:
            raise SystemExit("no environment")
        verdict = move("slow", "fault", "never")
        return environment(
            start=move("slow", "fault"),
            step=move("slow", "fault", "never"),
            reward=1.0 if verdict is None else verdict,
            close=move("slow"),
        )

    threads = threading.active_count()
    total = 0
    with open_pool(
        make,
        environments=BOUND,
        attempts=2,
        command_timeout_secs=0.05,
        verify_timeout_secs=0.05,
        trajectory_timeout_secs=0.5,
        step_timeout_secs=1.0,
    ) as pool:
        for step in range(batches):
            pool.start(jobs(members, step), 0)
            events = []
            if rng.random() < 0.5:
                stop = rng.randrange(members)
                while pool.outstanding and len(outcomes(events)) < stop:
                    events.append(pool.next_event(20.0))
                pool.cancel()
            found = outcomes(events + drain(pool))
            assert len(found) == members
            assert all(e.reason for e in of_kind(found.values(), Failed))
            total += len(found)
    assert environment.made == environment.closed and environment.alive == 0
    assert environment.most <= BOUND
    assert threading.active_count() <= threads
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attempts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, rng = time.monotonic(), random.Random(options.seed)
    while Counted.made < options.attempts:
        stress(Counted, rng, batches=5, members=64)
        print(f"{Counted.made} attempts, {time.monotonic() - start:.0f} s", flush=True)
    print(
        f"{Counted.made} environments made, {Counted.closed} closed once, "
        f"{Counted.alive} alive, at most {Counted.most} at a time (bound {BOUND})"
    )


if __name__ == "__main__":
    main()
