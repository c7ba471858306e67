"""Real vLLM servers, where THUNDERSYNC_VLLM names the executable."""

import contextlib
import os
import signal
import socket
import subprocess
import time

import pytest

from thundersync_jax.engines.vllm.engine import Server

EXECUTABLE = os.environ.get("THUNDERSYNC_VLLM")
MARKS = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not EXECUTABLE, reason="THUNDERSYNC_VLLM names no vllm executable"
    ),
]
START_SECS = 300.0


class Process:
    """One server on a free port; a context that ends it and all that it started.

    Attributes:
      server: For calls to it.
      folder: What it serves.
    """

    def __init__(self, folder, context_tokens):
        self.folder = str(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.server = Server(f"http://127.0.0.1:{port}", 60.0)
        command = [EXECUTABLE, "serve", self.folder, "--port", str(port)]
        command += ["--dtype", "float32", "--max-model-len", str(context_tokens)]
        command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs"]
        given = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self._log = f"{self.folder}.{port}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **given},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def address(self):
        return self.server.address

    @property
    def alive(self):
        """Whether the process that was started is still the one that runs."""
        return self._process.poll() is None

    def wait(self):
        """Returns once it is healthy."""
        end = time.monotonic() + START_SECS
        while True:
            with open(self._log, errors="replace") as log:
                assert self.alive, log.read()[-2000:]
            with contextlib.suppress(ConnectionError):
                return self.server.health()
            assert time.monotonic() < end, "it does not become healthy"
            time.sleep(0.5)

    def kill(self):
        """At once, as the system does where memory ends."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()
