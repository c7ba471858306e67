"""A server that speaks vLLM's wire format, and can die, hang, lie and be slow.

Its model is a function from a prefix to logits. It samples and scores as a real server
with --logprobs-mode processed_logprobs does: answers at the request's temperature,
prompts before it.
"""

import contextlib
import http.server
import json
import select
import socket
import threading
import time

import numpy as np

from thundersync_jax.config import VLLMConfig
from thundersync_jax.engines.vllm.engine import Published, VLLMEngine

VOCAB = 264
MODEL = "fake"
LOOK_SECS = 0.01  # between two looks whether a client is still there


def hashed_logits(prefix):
    """Logits that every id of the prefix changes."""
    return np.random.default_rng([1, *prefix]).normal(0.0, 1.0, VOCAB)


def log_softmax(logits):
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.sum(np.exp(shifted)))


class FakeServer:
    """One server, in threads of this process; a context that ends it.

    Attributes:
      bodies: Of the completions that were asked for.
      ids: Their request ids.
      aborted: Request ids of those whose client left before the answer.
      calls: Paths of all other posts, in order.
      connections: How many were opened so far.
      weight_version: As POST /update_weight_version sets it.
      logits: Function of the prefix, a list of ids.
      script: Function of the prompt that gives the ids of an answer; None samples.
      change: Function of a body and its answer, which may be told otherwise: a value,
        or text that is sent as it is.
      choose_status: Function of a body; all but 200 are sent with an error.
      delay_secs: Of completions; `hang` is for ever.
      healthy: Whether /health answers at all.
    """

    def __init__(self, max_model_len=512, development=True, logits=hashed_logits):
        self.max_model_len = max_model_len
        self.development = development
        self.port = 0  # any that is free
        self.logits = logits
        self.bodies, self.ids, self.aborted, self.calls = [], [], [], []
        self.connections = 0
        self.weight_version = "default"
        self.script = None
        self.change = None
        self.choose_status = lambda body: 200
        self.delay_secs = 0.0
        self.healthy = True
        self.on_reload = lambda: None
        self._sockets = set()
        self._ended = threading.Event()

    def __enter__(self):
        outer = self

        class Handler(_Handler):
            fake = outer

        class HTTP(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass  # clients leave, and servers are killed

        self._server = HTTP(("127.0.0.1", self.port), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.kill()

    def kill(self):
        """Ends as a process does: no connection is left, none is taken."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def hang(self):
        """Completions are taken and never answered."""
        self.delay_secs = 3600.0

    def answer(self, body):
        """The answer to POST /v1/completions."""
        prompt = body["prompt"]
        ids, tables = self._sampled(body)
        scored = None
        if body.get("prompt_logprobs") is not None:
            scored = [None] + [
                self._table(prompt[:end], prompt[end], body["prompt_logprobs"])
                for end in range(1, len(prompt))
            ]
        logprobs = {"top_logprobs": tables}
        stopped = ids[-1] in body.get("stop_token_ids", ())
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": None if body.get("logprobs") is None else logprobs,
            "finish_reason": "stop" if stopped else "length",
            "prompt_logprobs": scored,
            "prompt_token_ids": prompt,
        }
        return {"object": "text_completion", "model": MODEL, "choices": [choice]}

    def _sampled(self, body):
        prefix, ids, tables = list(body["prompt"]), [], []
        rng = np.random.default_rng(body.get("seed"))
        script = self.script(prefix) if self.script else None
        most = min(body["max_tokens"], self.max_model_len - len(prefix))
        for step in range(most if script is None else min(most, len(script))):
            temperature = body["temperature"]
            logprobs = log_softmax(self.logits(prefix) / (temperature or 1.0))
            if script is not None:
                chosen = int(script[step])
            elif temperature:
                cumulative = np.cumsum(np.exp(logprobs))
                share = rng.random() * cumulative[-1]
                chosen = int(np.searchsorted(cumulative, share, side="right"))
            else:
                chosen = int(np.argmax(logprobs))
            ids.append(chosen)
            prefix.append(chosen)
            tables.append({f"token_id:{chosen}": float(logprobs[chosen])})
            if chosen in body.get("stop_token_ids", ()):
                break
        return ids, tables

    def _table(self, prefix, token, top_k):
        logprobs = log_softmax(self.logits(prefix))
        order = np.argsort(-logprobs, kind="stable")
        ranks = np.empty(len(order), int)
        ranks[order] = np.arange(1, len(order) + 1)
        # The token itself comes first, whatever its rank.
        return {
            str(i): {"logprob": float(logprobs[i]), "rank": int(ranks[i])}
            for i in dict.fromkeys([token, *order[:top_k].tolist()])
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept
    fake: FakeServer

    def setup(self):
        super().setup()
        self.fake._sockets.add(self.connection)
        self.fake.connections += 1

    def finish(self):
        self.fake._sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_):
        pass

    def do_GET(self):
        fake = self.fake
        if self.path == "/health":
            if fake.healthy:
                return self._send(200, "")
            return self._wait(3600.0)
        if self.path == "/v1/models":
            card = {"id": MODEL, "root": "/fake", "max_model_len": fake.max_model_len}
            return self._send(200, {"data": [card]})
        if self.path == "/weight_info" and fake.development:
            return self._send(200, {"weight_version": fake.weight_version})
        return self._send(404, {"detail": "Not Found"})

    def do_POST(self):
        fake = self.fake
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(text) if text else None
        if self.path == "/v1/completions":
            return self._complete(body)
        if not fake.development:
            return self._send(404, {"detail": "Not Found"})
        fake.calls.append(self.path)
        if self.path == "/update_weight_version":
            fake.weight_version = body["new_version"]
        if self.path == "/collective_rpc":
            fake.on_reload()
        return self._send(200, {"status": "done"})

    def _complete(self, body):
        fake = self.fake
        label = self.headers.get("X-Request-Id")
        fake.bodies.append(body)
        fake.ids.append(label)
        if fake.delay_secs and not self._wait(fake.delay_secs):
            fake.aborted.append(label)
            return None
        status = fake.choose_status(body)
        if status != 200:
            error = {"message": "the engine is not well", "code": status}
            return self._send(status, {"error": error})
        if len(body["prompt"]) >= fake.max_model_len:
            return self._send(400, {"error": {"message": "the prompt is too long"}})
        answer = fake.answer(body)
        return self._send(200, fake.change(body, answer) if fake.change else answer)

    def _wait(self, secs):
        """Whether the client is still there after so long."""
        end = time.monotonic() + secs
        while time.monotonic() < end and not self.fake._ended.is_set():
            readable, _, _ = select.select([self.connection], [], [], LOOK_SECS)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.close_connection = True
                return False
        return not self.fake._ended.is_set()

    def _send(self, status, value):
        text = value if isinstance(value, str) else json.dumps(value)
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def name_versions(params, version, servers):
    """A publication without weights."""
    for server in servers:
        server.set_weight_version(str(version))
    return Published(str(version), {})


def engine_of(*fakes, lines=None, publish=name_versions, **settings):
    """The engine of some servers, with sessions of 64 tokens."""
    addresses = tuple(fake.address for fake in fakes)
    settings = VLLMConfig(addresses, weights_dir="/served", **settings)
    on_line = print if lines is None else lines.append
    return VLLMEngine(settings, 64, VOCAB, publish, on_line)
