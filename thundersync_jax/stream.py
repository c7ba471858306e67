"""`GradientStream`: the gradient of one step, computed while its rewards arrive.

Tell it of groups, samples, completions, rewards and failures in any order; `finish()`
returns the gradient of

    loss(params) = (1 / Z) * [ sum_i A_i * weighted_i + sum_i additive_i ]

over the members that count. The parameters are fixed for the life of a stream, so the
order of events changes nothing but the rounding of sums. It knows no model, no
environment and no optimizer, and it starts no thread.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from thundersync_jax import accumulator, mesh, refusals, signature
from thundersync_jax.buckets import Padded
from thundersync_jax.coefficients import Coefficients
from thundersync_jax.errors import StreamError
from thundersync_jax.ledger import Denominator, Ledger, PartialGroups, Report
from thundersync_jax.ledger import SampleRecord as Record
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.replica import IN_FLIGHT, Replica, wait_for_any
from thundersync_jax.schedule import Call, Close, Release, Schedule
from thundersync_jax.surrogate import Structure, Surrogate, structure, traced

Tree = Any


class GradientStream:
    """Collects one step and returns its gradient. One thread owns a stream.

    What it refuses changes nothing and the stream goes on. An error half-way through a
    decision, as a compilation that fails, ends it: no gradient misses a sample quietly.

    Args:
      surrogate: Maps (params, sample) to a `Surrogate`, or (params, frozen, sample)
        where `frozen` is given. Pass the same function object in every step: compiled
        programs belong to it.
      params: Parameters to differentiate, floating-point arrays. Where they lie on a
        mesh with an axis named "replica", every index of it works on its own.
      estimator: Group advantage (module `advantages`), or None where there are no
        rewards: then `complete` settles a member and everything is `additive`.
      denominator: Z: "none" (1), "groups" or "trajectories" kept, their "tokens", or a
        number.
      release: When a gradient may start: "batch" once `finish` is called, "group" once
        all rewards of its group are in, "trajectory" once its own reward is in.
      open_groups: How many incomplete groups may hold sums, each 2 or 3 times the
        parameters' size in float32. Needed under "trajectory" release only.
      partial_groups: What a group with failed members does: "drop" leaves nothing of
        it, "keep" makes its survivors the group, "fail" ends the step with an error.
      policy_version: Of `params`; samples of another one are refused. Where it is None
        the first version seen is the one.
      frozen: Further arrays for the surrogate, such as a reference policy. No gradient.
      rows_per_call: How many samples share a gradient call where that many wait whose
        gradients are needed as one sum only: final ones, or those of one open group
        with equal rewards.
      pad_last: Under "batch" release, whether the last call of a bucket is always
        padded to `rows_per_call`: one program per bucket. Otherwise only where samples
        fill more than half of it; fewer go alone, in a second program.
      on_call: Called with each `Call` and an array that is ready when it has ended.
      on_compile: Called with one line before a gradient program compiles.

    Raises:
      ValueError: A setting is not one of the above, or settings contradict each other.
    """

    def __init__(
        self,
        surrogate: Callable[..., Surrogate],
        params: Tree,
        *,
        estimator: Estimator | None,
        denominator: Denominator = "trajectories",
        release: Release = "trajectory",
        open_groups: int = 4,
        partial_groups: PartialGroups = "drop",
        policy_version: int | None = None,
        frozen: Tree = None,
        rows_per_call: int = 1,
        pad_last: bool = True,
        on_call: Callable[[Call, jax.Array], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        refusals.check_functions(surrogate, estimator)
        refusals.check_choices(denominator, release, partial_groups)
        refusals.check_count("rows_per_call", rows_per_call, "give at least 1")
        held = estimator is not None or partial_groups == "drop"
        if release == "trajectory" and held:
            refusals.check_count(
                "open_groups",
                open_groups,
                "release 'trajectory' sums unfinished groups, give at least 1, or "
                "release 'group' or 'batch'",
            )
        self._surrogate = surrogate
        self._params = jax.tree.map(signature.parameter, params)
        self._frozen = jax.tree.map(signature.device_leaf, frozen)
        self._estimator = estimator
        self._denominator = denominator
        self._partial = partial_groups
        self._version = policy_version
        self._on_call, self._on_compile = on_call, on_compile
        self._schedule = Schedule(
            release,
            open_groups if release == "trajectory" and held else 0,
            drop_partial=partial_groups == "drop",
            rewards=estimator is not None,
            held=held,
            rows_per_call=rows_per_call,
            pad_last=pad_last,
        )
        self._ledger = Ledger()
        self._structure: Structure | None = None
        self._replicas = [
            Replica(surrogate, *views)
            for views in zip(*mesh.split(self._params, self._frozen), strict=True)
        ]
        self._coefficients = Coefficients(estimator)
        self._open: set[int] = set()
        self._open_max = 0
        self._compiles = 0
        arguments = signature.placed((self._params, self._frozen))
        self._arguments = signature.number(arguments)
        self._traced = traced(surrogate)
        self._thread = threading.get_ident()
        self._ended: str | None = None

    def open_group(self, group: Hashable, members: int) -> None:
        """Announces a group: the `members` trajectories of one prompt."""
        self._check_thread()
        self._schedule.open_group(group, members)

    def sample(
        self,
        group: Hashable,
        member: int,
        sample: Tree,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Adds a sample to a member; `complete` says that it was the last.

        Args:
          group: As in `open_group`.
          member: Index from 0.
          sample: A pytree of arrays for the surrogate, or a `Padded` one.
          tokens: Its trained tokens, for the denominator "tokens" and the report.
          policy_version: The version that sampled it.

        Raises:
          ValueError: It cannot be used; nothing has changed.
        """
        self._check_thread()
        refusals.check_version(group, member, policy_version, self._version)
        needed = self._denominator == "tokens"
        tokens = refusals.tokens(group, member, tokens, needed)
        padded = sample if isinstance(sample, Padded) else Padded(sample, 1, 1)
        tree = jax.tree.map(signature.sample_leaf, padded.tree)
        bucket = signature.shapes(tree)
        parts = self._examine(tree, bucket)
        item = self._schedule.sample(group, member, bucket)
        if len(self._replicas) == 1:  # else nobody knows yet where it will run
            tree = self._replicas[0].put(tree)
        self._ledger.samples[item[:3]] = Record(
            tree, tokens, padded.real_tokens, padded.padded_tokens
        )
        self._structure = parts
        self._schedule.held = parts.weighted or self._holds_additive
        self._version = policy_version if self._version is None else self._version

    def complete(
        self,
        group: Hashable,
        member: int,
        sample: Tree = None,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """All tokens of a member are final; `sample` adds its last or only sample."""
        if sample is not None:
            self.sample(
                group, member, sample, tokens=tokens, policy_version=policy_version
            )
        else:
            self._check_thread()
            refusals.check_no_tokens(group, member, tokens)
            refusals.check_version(group, member, policy_version, self._version)
        close = self._schedule.complete(group, member)
        self._version = policy_version if self._version is None else self._version
        self._settle(close)

    def reward(self, group: Hashable, member: int, reward: float) -> None:
        """The verdict on a member is in, before or after `complete`.

        Raises:
          ValueError: It is not a finite number (call `fail` for such a member), or the
            stream has no estimator and takes none.
        """
        self._check_thread()
        value = refusals.reward(group, member, reward, self._estimator)
        close = self._schedule.reward(group, member, value)
        self._ledger.rewards[group, member] = value
        self._settle(close)

    def fail(self, group: Hashable, member: int, reason: str) -> None:
        """Withdraws a member that is not settled, with whatever it left.

        Raises:
          StreamError: `partial_groups` is "fail".
        """
        self._check_thread()
        close = self._schedule.fail(group, member)
        self._ledger.failures[group, member] = reason
        self._ledger.rewards.pop((group, member), None)
        if self._partial == "fail":
            self._ended = "ended with a failed member"
            raise StreamError(
                f"group {group!r} member {member} failed ({reason}) and partial_groups "
                "is 'fail'; 'drop' or 'keep' would go on without it"
            )
        self._settle(close)

    def advance(self) -> bool:
        """Starts ready work on free replicas. Returns whether any is left waiting."""
        self._check_thread()
        while True:
            load, index = min((r.load, i) for i, r in enumerate(self._replicas))
            if load >= IN_FLIGHT:
                return self._schedule.ready
            with self._or_end():
                call = self._schedule.next_call(index)
                if call is None:
                    return False
                self._start(call)

    def finish(self) -> tuple[Tree, Report]:
        """Ends the step.

        Returns:
          The gradient, with the structure, shapes and layout of `params`, in float32
          (float64 for float64 parameters), and the report.

        Raises:
          ValueError: Members are neither settled nor failed; the stream goes on.
          StreamError: A gradient is not finite; names the trajectories where one of
            them is at fault.
        """
        self._check_thread()
        refusals.check_settled(self._schedule.outstanding())
        self._schedule.flush()
        while self.advance():
            wait_for_any(self._replicas)
        self._ended = "is finished"
        ledger = self._ledger
        denominator = ledger.denominator(self._denominator)
        batches = [replica.batch for replica in self._replicas]
        self._replicas.clear()  # sums of groups go before the gradient comes
        sums = mesh.join(batches, self._params)
        gradient, norm = accumulator.finalize(sums, denominator, self._params)
        values = jax.device_get([evaluated for _, evaluated in ledger.calls])
        parts = self._structure
        ledger.check_finite(values, norm, bool(parts and parts.additive))
        report = ledger.report(
            values,
            denominator,
            metrics=(parts.sums, parts.maxima) if parts else ((), ()),
            waited=self._schedule.waited,
            compiles=self._compiles,
            open_groups_max=self._open_max,
            group_sum_bytes=self._group_sum_bytes(),
            gradient_norm=float(norm),
        )
        return gradient, report

    @property
    def advantages(self) -> dict[tuple[Hashable, int], float]:
        """Advantages by (group, member), of kept groups whose rewards are in."""
        return {
            (group, member): advantage
            for group, members in self._ledger.advantages.items()
            for member, advantage in members.items()
        }

    def _settle(self, close: Close | None) -> None:
        if close is not None:
            with self._or_end():
                self._close(close)
        self.advance()

    def _close(self, close: Close) -> None:
        group, ledger = close.group, self._ledger
        self._open.discard(close.place)
        if not close.kept:
            ledger.dropped.add(group)
            for index in close.replicas:
                self._replicas[index].close(close.place, None)
            return
        survivors = self._schedule.survivors(group)
        rewards = [r for r in survivors.values() if r is not None]
        if len(set(rewards)) == 1:
            ledger.uniform.add(group)
        advantages = self._estimator.advantages(rewards) if rewards else ()
        ledger.advantages[group] = dict.fromkeys(survivors, 0.0) | dict(
            zip(survivors, map(float, advantages), strict=False)
        )
        if close.replicas:
            coefficients = self._coefficients.close(
                group, rewards, self._holds_additive
            )
            for index in close.replicas:
                self._replicas[index].close(close.place, coefficients)
        parts = self._structure
        if parts and not (parts.additive or parts.sums or parts.maxima):
            zero = {m for m, a in ledger.advantages[group].items() if a == 0}
            ledger.counts["skipped"] += self._schedule.discard(group, zero)

    def _start(self, call: Call) -> None:
        ledger, parts = self._ledger, self._structure
        replica = self._replicas[call.replica]
        trees = [ledger.samples[item[:3]].tree for item in call.items]
        split = call.place is not None and parts.weighted and parts.additive
        self._announce(call, split)
        if call.place is None:
            weights = np.zeros((call.rows, 2))
            for row, item in enumerate(call.items):
                advantages = ledger.advantages.get(item.group, {})
                advantage = advantages.get(item.member, 0.0)
                weights[row] = advantage * parts.weighted, parts.additive
            trees += trees[:1] * (call.rows - len(trees))
            evaluated = replica.direct(trees, weights)
        else:
            self._open.add(call.place)
            self._open_max = max(self._open_max, len(self._open))
            item = call.items[0]
            reward = ledger.rewards[item[:2]] if parts.weighted else None
            weights = self._coefficients.hold(item.group, reward, self._holds_additive)
            add_now = split and not self._holds_additive
            evaluated = replica.hold(trees, call.place, weights, add_now)
        ledger.record_call(call, evaluated)
        if self._on_call:
            self._on_call(call, evaluated.finite)

    @property
    def _holds_additive(self) -> bool:
        return self._structure.additive and self._partial == "drop"

    def _examine(self, tree, bucket) -> Structure:
        """Looks at the surrogate's parts once per shape signature."""
        key, known = (self._arguments, bucket), self._traced.structures
        if key not in known:
            known[key] = structure(self._surrogate, self._params, self._frozen, tree)
        refusals.check_parts(known[key], self._structure, self._estimator)
        return known[key]

    def _group_sum_bytes(self) -> int:
        if not self._open_max:
            return 0
        channels = 2 * self._structure.weighted + self._holds_additive
        return channels * self._open_max * accumulator.bytes_per_device(self._params)

    def _announce(self, call: Call, split: bool) -> None:
        bucket = call.items[0].bucket
        program = (self._arguments, split, call.rows, call.replica, bucket)
        if program in self._traced.programs:
            return
        self._traced.programs.add(program)
        self._compiles += 1
        if self._on_compile:
            shapes = ", ".join(str(shape) for shape, _ in call.items[0].bucket[1])
            self._on_compile(f"gradient of {call.rows} x {shapes}")

    @contextlib.contextmanager
    def _or_end(self):
        """A decision that is half carried out leaves no step to go on with."""
        try:
            yield
        except BaseException as error:
            self._ended = f"stopped at {type(error).__name__}"
            raise

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ValueError(
                f"called from thread {threading.current_thread().name!r}; the thread "
                "that made a GradientStream owns it, pass events to it in a queue"
            )
        if self._ended:
            raise ValueError(
                f"this stream {self._ended}; make a new one for every step"
            )
