"""What a run says that its gradient sums take is what they take."""

import collections
import functools
import gc
import os

import echo_task
import jax
import numpy as np
import pytest
import sum_memory

from thundersync_jax.ops import exact_sum
from thundersync_jax.run.run import Run
from thundersync_jax.stream import accumulator as accumulator_module
from thundersync_jax.stream import sums as sums_module

AGREE = 0.05  # relative, between what is said and what is held
SAME = 1e-6  # relative, a gradient whose sums were folded in another order
SAME_PEAK = 0.01  # relative; samples on their way to the device are in it
GROUPS, MEMBERS = 12, 3
# Of a sum. Exact ones look at the exponents first, in one byte per entry beside twelve.
COPIES = {"plain": 0.01, "exact": 0.12}
FOLDS = {
    "plain": {
        accumulator_module._add_group,
        accumulator_module._add_direct,
        accumulator_module._close_group,
    },
    "exact": {exact_sum.add, sums_module._added_multiple},
}


def held():
    """Bytes on each device; arrays that share memory count once."""
    pieces = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            at = shard.device, shard.data.unsafe_buffer_pointer()
            pieces[at] = max(pieces.get(at, 0), shard.data.nbytes)
    bytes_on = collections.Counter()
    for (device, _), size in pieces.items():
        bytes_on[device] += size
    return bytes_on


class Watched:
    """A run whose learner's memory is looked at after every call and every event.

    Attributes:
      said: Bytes of sums, and open groups, at start-up.
      count: Parameters.
      peak: The most bytes that a device held beside what was there before the step.
      first_call: Members that had come when the first gradient was dispatched.
      gradient: Of a step of made-up members.
      report: Likewise.
    """

    def __init__(self, folder, open_groups, groups=GROUPS, members=MEMBERS, **changes):
        lines = []
        config = sum_memory.config(open_groups, **changes)
        with Run(config, folder, echo_task.make, lines.append) as run:
            self.said = sum_memory.said(lines)
            self.count = sum_memory.parameter_count(lines)
            params = run.initial_params()
            gc.collect()
            before, readings, calls, events = held(), [], [], []

            def read(times, *_):
                times.append(len(events))
                readings.append(max((held() - before).values(), default=0))

            run.clock.on_call = functools.partial(read, calls)
            self.gradient, self.report = sum_memory.drive(
                run, params, groups, members, functools.partial(read, events)
            )
        self.peak, self.first_call = max(readings), calls[0] + 1


def said_sums(open_groups, accumulator):
    """How many there are, and words per parameter of each."""
    exact = accumulator == "exact"
    return 1 + 2 * open_groups + exact, 3 if exact else 1


@pytest.mark.parametrize("accumulator", sum_memory.ACCUMULATORS)
@pytest.mark.parametrize("open_groups", sum_memory.OPEN_GROUPS)
def test_sums_take_what_was_said_at_start_up(open_groups, accumulator, tmp_path):
    watched = Watched(tmp_path, open_groups, accumulator=accumulator)
    said, groups = watched.said
    assert groups == watched.report.open_groups_max == open_groups
    assert watched.peak == pytest.approx(said, rel=AGREE)
    number, words = said_sums(open_groups, accumulator)
    assert said == pytest.approx(4 * number * words * watched.count, rel=AGREE)


@pytest.mark.parametrize("accumulator", sum_memory.ACCUMULATORS)
def test_sharded_sums_take_what_was_said_on_each_device(accumulator, tmp_path):
    changes = {"mesh.fsdp": 2, "mesh.sampler": "own_device", "accumulator": accumulator}
    watched = Watched(tmp_path, 4, **changes)
    said, _ = watched.said
    number, words = said_sums(4, accumulator)
    assert said == pytest.approx(4 * number * words * watched.count / 2, rel=AGREE)
    assert watched.peak == pytest.approx(said, rel=AGREE)


@pytest.mark.parametrize("accumulator", sum_memory.ACCUMULATORS)
def test_the_peak_does_not_grow_with_the_number_of_trajectories(accumulator, tmp_path):
    """No gradient waits for others, be they more groups or more members of one."""
    peaks = []
    for groups, members in ((2, 4), (16, 4), (2, 32)):
        watched = Watched(tmp_path, 1, groups, members, accumulator=accumulator)
        assert watched.report.kept_members == groups * members
        assert watched.first_call < groups * members / 2
        peaks.append(watched.peak)
    assert peaks == pytest.approx([peaks[0]] * 3, rel=SAME_PEAK)


@pytest.mark.parametrize("accumulator", sum_memory.ACCUMULATORS)
def test_programs_that_fold_gradients_hold_no_copy(accumulator, tmp_path, monkeypatch):
    """Neither beside the sums nor of them, on the way that a step takes them."""
    copies, compiled = {}, accumulator_module.compiled

    def examined(function, sums):
        program = compiled(function, sums)

        def call(*arguments):
            memory = program.lower(*arguments).compile().memory_analysis()
            size = sum(x.nbytes for x in jax.tree.leaves(sums))
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            copies[function] = (memory.temp_size_in_bytes + fresh) / size
            at = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(sums)]
            out = program(*arguments)
            assert at == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)]
            return out

        return call

    monkeypatch.setattr(accumulator_module, "compiled", examined)
    Watched(tmp_path, 2, accumulator=accumulator)
    assert copies.keys() == FOLDS[accumulator]
    assert max(copies.values()) < COPIES[accumulator]


def test_a_small_byte_budget_holds_fewer_groups_open(tmp_path):
    """And changes nothing in the gradient; the rest waits and goes directly."""
    wide = Watched(tmp_path, 8)
    budget = int(3.5 * 2 * 4 * wide.count)
    for wished in (8, None):
        narrow = Watched(tmp_path, wished, group_sum_bytes=budget)
        assert (narrow.said[1], narrow.report.open_groups_max) == (3, 3)
        assert narrow.report.group_sum_bytes <= budget
        assert narrow.peak < wide.peak / 2
        for report in (wide.report, narrow.report):
            assert report.direct + report.streamed == GROUPS * MEMBERS
            # The last of a group never waits: with it the rewards are in.
            assert report.direct == report.waited + GROUPS
        assert narrow.report.waited > wide.report.waited
        assert difference(narrow.gradient, wide.gradient) < SAME


def test_a_finished_stream_holds_no_sums(tmp_path):
    """The optimizer's update follows while the stream may still be at hand."""
    with Run(sum_memory.config(4), tmp_path, echo_task.make, lambda line: None) as run:
        params = run.initial_params()
        streams, new_stream = [], run.new_stream
        run.new_stream = lambda *given, **named: (
            streams.append(new_stream(*given, **named)) or streams[-1]
        )
        gc.collect()
        before = held()
        gradient, _ = sum_memory.drive(run, params, GROUPS, MEMBERS)
        one = sum(x.nbytes for x in jax.tree.leaves(gradient))
        assert streams[0].advantages  # it is still there
        assert max((held() - before).values()) == pytest.approx(one, rel=AGREE)


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="this system does not tell the peak of resident memory",
)
def test_resident_memory_grows_by_what_was_said():
    """Of exact sums; `sum_memory.py` measures plain ones as well."""
    rows = sum_memory.measure(accumulator="exact")
    for row in rows:
        assert row.lasting == pytest.approx(row.said, rel=AGREE)
    # One gradient and its intermediate values come on top, whatever the number.
    assert sum_memory.slope(rows, "peak") == pytest.approx(1, rel=AGREE)


def difference(found, expected):
    """L2 over the tree, relative."""
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    gaps = [np.linalg.norm(a - b) for a, b in pairs]
    sizes = [np.linalg.norm(x) for x in jax.tree.leaves(expected)]
    return np.linalg.norm(gaps) / np.linalg.norm(sizes)
