"""Every gradient program that a step may need, compiled before the first one."""

from collections.abc import Hashable
from typing import Any

from thundersync_jax.run.run import Run
from thundersync_jax.stream.gradient_stream import GradientStream
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.turn_stream import TurnStream

Tree = Any


def compile_all(run: Run, params: Tree, version: int) -> None:
    """Compiles what the config's release rule needs, so that no step waits."""
    if run.config.release == "turn":
        made_up_calls(run, params, version, "turn", rows=1, members=1)
        return
    made_up_calls(run, params, version, "trajectory", rows=1, members=2)
    rows = run.config.mesh.rows_per_call
    if rows > 1 and run.config.accumulator == "plain":
        # More than half a call of each length: fewer go one by one.
        made_up_calls(run, params, version, "batch", rows, members=rows)


def made_up_calls(
    run: Run,
    params: Tree,
    version: int,
    release: str,
    rows: int,
    members: int,
    accumulator: str | None = None,
) -> None:
    """Computes gradients of trajectories without meaning, and drops the result.

    Args:
      run: Its buckets and surrogate.
      params: Where gradients are taken.
      version: Their policy version.
      release: Under "trajectory" all members but the last of a bucket are streamed.
      rows: Rows per call.
      members: Trajectories per group; all weights are 0.
      accumulator: How sums are taken; None as the config says.
    """
    stream = run.new_stream(params, version, release, rows, accumulator)
    if isinstance(stream, TurnStream):
        _turns(run, stream)
    elif run.config.share_prompt == "group":
        for prompt in run.config.rollout.segment_lengths:
            for length in run.config.rollout.segment_lengths:
                shared = run.samples.made_up(prompt, 0)
                sample = run.samples.made_up(length, 1)
                _group(run, stream, (prompt, length), members, sample, shared)
    else:
        for length in run.config.rollout.gradient_buckets:
            sample = run.samples.whole(run.samples.untrained(length))
            _group(run, stream, length, members, sample)
    stream.finish()


def _group(
    run: Run,
    stream: GradientStream,
    name: Hashable,
    members: int,
    sample: Padded,
    prompt: Padded | None = None,
) -> None:
    stream.open_group(name, members, prompt=prompt)
    for member in range(members):
        stream.complete(name, member, sample, tokens=1)
        if run.judged:
            stream.reward(name, member, float(member))
        stream.drain()


def _turns(run: Run, stream: TurnStream) -> None:
    """Every length as a first turn and, replayed, as an earlier one."""
    shared = int(run.config.share_prompt == "group")  # tokens of the prompt
    for length in run.config.rollout.segment_lengths:
        prompt = run.samples.made_up(length, 0) if shared else None
        stream.open_group(length, 1, prompt=prompt)
        for start in (shared, shared + 1):
            sample = run.samples.made_up(length, start)
            stream.turn(length, 0, sample, tokens=1)
        stream.complete(length, 0)
        stream.drain()
