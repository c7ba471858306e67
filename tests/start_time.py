"""Seconds until the tasks of a run are prepared, for 100,000 of them.

    python tests/start_time.py

With a chat template and five tools: short prompts, of which the text alone shows that
they fit; long ones in a small context, each of which has to be rendered; and these once
more, with the counts that the first start kept. Beside it the seconds of rendering and
tokenising every prompt, measured on 2,000. Prints one JSON line last.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import chat_folders

from thundersync_jax.chat.templates import TemplateChat
from thundersync_jax.config import Config, RolloutConfig
from thundersync_jax.envs.base import TaskSet
from thundersync_jax.run import task_tokens
from thundersync_jax.run import tasks as run_tasks

TOOLS = [
    {
        "type": "function",
        "function": dict(chat_folders.CALCULATOR["function"], name=name),
    }
    for name in ("bash", "edit", "read", "search", "calculator")
]
SAMPLE = 2_000


def prepare(tasks: TaskSet, chat: TemplateChat, limit: int, folder: Path) -> float:
    start = time.monotonic()
    rollout = RolloutConfig(context_tokens=limit)
    counts = task_tokens.Counts(tasks, chat, print)
    run_tasks._fitting(tasks, Config(rollout=rollout), counts, folder)
    if counts.took_long:
        counts.keep(folder)
    return time.monotonic() - start


def tasks_of(count: int, words: int) -> TaskSet:
    prompts = [f"Task {i}: " + "mend the parser " * words for i in range(count)]
    return TaskSet(prompts[:-100], prompts[-100:], None, lambda prompt: prompt)


def main(count: int) -> None:
    seconds = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chat = TemplateChat(chat_folders.write(folder / "model", "qwen3"), TOOLS)
        short, long = tasks_of(count, 20), tasks_of(count, 100)
        start = time.monotonic()
        for task in short.train[:SAMPLE]:
            chat.prompt(task)
        seconds["rendering each"] = (time.monotonic() - start) * count / SAMPLE
        limit = len(chat.prompt(long.train[0]))
        seconds["by their size"] = prepare(short, chat, 4 * limit, folder)
        seconds["counted"] = prepare(long, chat, limit + 10, folder)
        seconds["counted before"] = prepare(long, chat, limit + 10, folder)
    print(json.dumps({"tasks": count} | {k: round(v, 2) for k, v in seconds.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=100_000)
    main(parser.parse_args().tasks)
