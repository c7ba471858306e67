"""Prompts that a group shares: run forward once, and backward once.

Each member's gradient is taken with respect to the parameters and to the state behind
the prompt. The cotangents of that state are weighed and summed as the gradients are
(the same kind of sums, on a small tree), and pushed through the prompt once all are in.
Per group and replica; it decides nothing and waits for no device.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from thundersync_jax.stream import segments as seg
from thundersync_jax.stream import sums
from thundersync_jax.stream.replica import Replica
from thundersync_jax.stream.schedule import BATCH, Call, Fold, Prompt
from thundersync_jax.stream.surrogate import Evaluated

Tree = Any


class Shared:
    """A group's prompt on one replica.

    Attributes:
      state: Behind it.
      sums: Of cotangents of the state.
    """

    def __init__(self, replica: Replica, tree: Tree, kind: str):
        self._replica, self._tree = replica, replica.put(tree)
        given = replica.params, replica.frozen, self._tree
        self.state = replica.run(seg.prompt_state, replica.function, *given)
        self.sums = sums.KINDS[kind]([self.state], self.state)

    def gradient(self) -> tuple[Tree, Evaluated]:
        """Starts the gradient of the prompt, of everything in the sums."""
        replica = self._replica
        given = replica.params, replica.frozen, self._tree, self.sums.read(0)
        return replica.start(seg.prompt_gradient, replica.function, *given)


class Prompts:
    """All shared prompts of a step.

    Args:
      replicas: Of the learner; their function is a `Segments`.
      kind: Of the sums, "plain" or "exact".
    """

    def __init__(self, replicas: Sequence[Replica], kind: str):
        self._replicas, self._kind = replicas, kind
        self._trees: dict[Hashable, Tree] = {}
        self._shared: dict[tuple[Hashable, int], Shared] = {}

    def open(self, group: Hashable, tree: Tree) -> None:
        """Announces the prompt of a group."""
        self._trees[group] = tree

    def tree(self, group: Hashable) -> Tree | None:
        """The prompt of a group; None where its samples hold it."""
        return self._trees.get(group)

    def of(self, group: Hashable, replica: int) -> Shared:
        """The prompt on a replica, which it runs at the first call."""
        if (group, replica) not in self._shared:
            where = self._replicas[replica]
            self._shared[group, replica] = Shared(where, self._trees[group], self._kind)
        return self._shared[group, replica]

    def direct(self, call: Call, cotangent: Tree) -> None:
        """Adds the cotangent of a call whose coefficients are inside it."""
        self._of(call).direct(0, cotangent)

    def hold(
        self, call: Call, unit: Hashable, reward: float | None, weighted, additive
    ) -> None:
        """Adds cotangents whose coefficients are unknown, as sums hold gradients."""
        self._of(call).hold(_at_home(call), unit, reward, weighted, additive)

    def fold(self, fold: Fold, table: sums.Table | None) -> None:
        """What is known of a unit now is known of the cotangents of its groups."""
        for (group, replica), shared in self._shared.items():
            if replica in fold.replicas and fold.unit in (group, BATCH):
                shared.sums.fold(fold._replace(replicas=(0,)), table)

    def close(
        self, prompt: Prompt, add: Callable[[int, Tree], None]
    ) -> list[tuple[int, Evaluated]]:
        """Differentiates a prompt and forgets it.

        Args:
          prompt: Which one.
          add: Takes a replica and a gradient for the batch.

        Returns:
          Per replica what was evaluated beside the gradient.
        """
        found = []
        for replica in prompt.replicas:
            shared = self._shared.pop((prompt.group, replica), None)
            if shared is not None and prompt.kept and not shared.sums.empty:
                gradient, evaluated = shared.gradient()
                add(replica, gradient)
                found.append((replica, evaluated))
        self._trees.pop(prompt.group, None)
        return found

    def _of(self, call: Call):
        return self.of(call.items[0].group, call.replica).sums


def _at_home(call: Call) -> Call:
    """A prompt's sums know one replica."""
    return call._replace(replica=0)
