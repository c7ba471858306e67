"""Checkpoints: arrays and facts of a step, committed together by one rename."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1

from thundersync_jax.errors import ConfigError, full

Tree = Any  # of arrays
_SHOWN_DIFFERENCES = 3


class Checkpoints:
    """The numbered checkpoints of one directory, of which one thread is the owner.

    Saves run in the background, one at a time. What fails there is raised by the next
    call of any method. The `keep` newest are kept, and leftovers of cut-off saves
    removed; None opens for reading only and removes nothing, since another process may
    be writing. Nothing is created before it is needed.
    """

    def __init__(self, directory: str | os.PathLike, keep: int | None = None):
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._saving: tuple[int, v1.AsyncResponse] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        self.wait()
        if not self._directory.is_dir():
            return []
        return [checkpoint.step for checkpoint in self._orbax.checkpoints]

    def latest(self) -> int | None:
        """The newest step with a complete checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, tree: Tree, host: Mapping[str, Any]) -> None:
        """Starts a save and returns; a save that still runs is waited for first.

        Args:
          step: Higher than those saved before.
          tree: Jax or numpy arrays, of which a copy is taken: the caller may donate
            or overwrite them at once. Random keys go in as `jax.random.key_data`.
          host: Facts that JSON can express, scalars of numpy too; else a TypeError.

        Raises:
          ConfigError: Opened for reading, a step that is not a later one, or a save
            before that found the disk full.
        """
        facts = json.loads(json.dumps(dict(host), default=_plain))
        latest = self.latest()
        if self._keep is None:
            raise ConfigError(
                f"step {step} cannot be saved, {self._directory} was opened for "
                "reading; expected a number of checkpoints to keep. Pass keep=2."
            )
        if latest is not None and step <= latest:
            raise ConfigError(
                f"step {step} cannot be saved, {self._directory} has step {latest}; "
                "expected a later one. Continue from the latest step."
            )
        # Orbax refuses numpy's scalars, but takes arrays without axes.
        tree = jax.tree.map(lambda x: x if _on_device(x) else np.asarray(x), tree)
        saving = self._orbax.save_async(step, tree, force=True, custom_metadata=facts)
        assert saving is not None, "orbax skips a save while another one runs"
        self._saving = step, saving

    def restore(
        self, step: int, like: Tree, part: bool = False
    ) -> tuple[Tree, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          step: One of `steps()`.
          like: Arrays or `jax.ShapeDtypeStruct`s of the saved structure, shapes and
            dtypes. Their shardings may be others than the saved ones.
          part: Whether `like` is a dict with some of the saved fields; the rest, such
            as an optimizer's state, is not read.

        Returns:
          The saved values, laid out as `like` is: on its shardings (the first device
          where it names none), numpy where it is numpy, and free to move between
          devices where it is. And the saved `host`.

        Raises:
          ConfigError: No such step, damaged files, or another structure, shape or
            dtype.
        """
        steps = self.steps()
        if step not in steps:
            raise ConfigError(
                f"{self._directory} has no checkpoint of step {step}, expected one of "
                f"{steps}. Take the latest, or train first."
            )
        try:
            with _reads_that_come_too_late():
                saved, tree = self._read(step, like, part)
        except ConfigError:
            raise
        except Exception as error:  # a damaged file fails wherever it is first missed
            older = [other for other in steps if other < step]
            rest = f"step {older[-1]} is used then" if older else "no older one is left"
            raise ConfigError(
                f"{self._directory / str(step)} cannot be read, expected a whole "
                f"checkpoint ({type(error).__name__}). Delete that directory: {rest}."
            ) from error
        return jax.tree.map(_placed, tree, like), saved.custom_metadata or {}

    def _read(self, step: int, like: Tree, part: bool) -> tuple[Any, Tree]:
        """What orbax knows of a checkpoint, and its arrays laid out as `like`."""
        saved = self._orbax.metadata(step)
        # What orbax finds where the file of the arrays, or of the facts, is torn.
        if not _by_path(saved.metadata) or saved.init_timestamp_nsecs is None:
            raise ValueError("it lists no arrays, or no facts")
        there = saved.metadata
        if part:
            there = {name: there[name] for name in like if name in there}
        self._check_like(step, there, like)
        loading = v1.options.PyTreeOptions.Loading(partial_load=part)
        options = v1.options.PyTreeOptions(loading=loading)
        with v1.Context(pytree_options=options):
            return saved, self._orbax.load(step, jax.tree.map(_abstract, like))

    def wait(self) -> None:
        """Blocks until nothing is being saved; raises what a save failed with."""
        if self._saving is None:
            return
        (step, saving), self._saving = self._saving, None
        failures = []
        # Orbax raises once per thread: `wait` in this one, `result` what its own met.
        for wait in (self._orbax.wait, saving.result):
            try:
                wait()
            except Exception as error:
                failures.append(error)
        if failures:
            # Orbax has struck out what this save was to replace, which is still there.
            self._orbax.reload()
            why = full(failures[0])
            if why is None:
                failures[0].add_note(f"while saving step {step} to {self._directory}")
                raise failures[0]
            kept = max((c.step for c in self._orbax.checkpoints), default="none")
            raise ConfigError(
                f"step {step} was not saved to {self._directory} ({why}), expected "
                f"room on that disk. Free some and run the same command again: the "
                f"newest whole checkpoint there is {kept}."
            ) from failures[0]

    def close(self) -> None:
        """Waits and releases; later calls open again."""
        try:
            self.wait()
        finally:
            if "_orbax" in vars(self):
                self._orbax.close()
                del self._orbax

    @functools.cached_property
    def _orbax(self) -> v1.training.Checkpointer:
        # Its records, several tracebacks per failure, also come as one exception.
        logging.getLogger("absl").addFilter(_not_of_orbax)
        logging.getLogger("asyncio").addFilter(_not_left_alone)
        policies = v1.training.preservation_policies
        kept = policies.LatestN(self._keep) if self._keep else policies.PreserveAll()
        return v1.training.Checkpointer(
            self._directory,
            preservation_policy=kept,
            cleanup_tmp_directories=self._keep is not None,
        )

    def _check_like(self, step: int, saved: Tree, like: Tree) -> None:
        """Orbax itself would convert dtypes without a word."""
        layout, wanted = _layout(saved), _layout(like)
        lines = [
            f"{path} is {layout.get(path, 'absent')}, "
            f"expected {wanted.get(path, 'absent')}"
            for path in sorted({*layout, *wanted})
            if layout.get(path) != wanted.get(path)
        ]
        if lines:
            more = len(lines) - _SHOWN_DIFFERENCES
            raise ConfigError(
                f"checkpoint of step {step} in {self._directory} does not fit: "
                + "; ".join(lines[:_SHOWN_DIFFERENCES])
                + (f"; {more} more" if more > 0 else "")
                + ". Restore it with the model and optimizer it was saved with."
            )


def sha256(tree: Tree) -> str:
    """Hash of every array's path, dtype, shape and bytes; shardings do not matter."""
    arrays = jax.device_get(tree)
    digest = hashlib.sha256()
    for path, x in sorted(_by_path(arrays).items()):
        x = np.asarray(x)
        digest.update(f"{path} {x.dtype.name} {x.shape}\n".encode())
        digest.update(x.tobytes())
    return digest.hexdigest()


def _by_path(tree: Tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {keystr(path): leaf for path, leaf in leaves}


def _layout(tree: Tree) -> dict[str, str]:
    described = {}
    for path, x in _by_path(tree).items():
        x = x if hasattr(x, "shape") else np.asarray(x)
        described[path] = f"{x.dtype}{list(x.shape)}"
    return described


def _on_device(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _abstract(like: Any) -> Any:
    if not _on_device(like):
        return np.asarray(like)
    sharding = like.sharding or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def _placed(x: Any, like: Any) -> Any:
    """Orbax pins every array to its devices; one that was free would now clash."""
    if isinstance(like, jax.Array) and not like.committed:
        return jnp.asarray(np.asarray(x))
    return x


def _plain(scalar: Any) -> Any:
    if isinstance(scalar, np.generic):
        return scalar.item()
    raise TypeError(f"host holds {scalar!r}, expected what JSON can express")


@contextlib.contextmanager
def _reads_that_come_too_late() -> Iterator[None]:
    """Silences what other reads raise in their threads once one has failed."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late = isinstance(unraisable.exc_value, RuntimeError)
        if not (late and "Event loop is closed" in str(unraisable.exc_value)):
            before(unraisable)

    sys.unraisablehook = hook
    yield
    if sys.unraisablehook is hook:  # an error leaves it
        sys.unraisablehook = before


def _not_left_alone(record: logging.LogRecord) -> bool:
    """Where one array cannot be read, orbax forgets the reads of the others."""
    text = record.getMessage()
    return not ("exception was never retrieved" in text and "OCDBT" in text)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
