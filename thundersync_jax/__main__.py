"""The commands: `thundersync train --config=FILE.py --workdir=DIR`, and their list.

`thundersync NAME` and `python -m thundersync_jax NAME` run the same as
`python -m thundersync_jax.NAME`.
"""

import ast
import runpy
import signal
import sys
from pathlib import Path

from thundersync_jax.config.settings import nearest

COMMANDS = ("train", "evaluate", "show", "compare", "verify", "bench", "export")


def main() -> None:
    """Runs the command that the command line names first, or lists all of them."""
    name, *_ = [*sys.argv[1:], "--help"]
    if name in ("--help", "-h", "help"):
        print(_listed())
        return
    if name not in COMMANDS:
        print(f"{name!r} is no command. {nearest(name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in __init__.py
    del sys.argv[1]
    runpy.run_module(f"thundersync_jax.{name}", run_name="__main__", alter_sys=True)


def _listed() -> str:
    lines = ["usage: thundersync COMMAND --flag=value ...", "", "commands:"]
    for name in COMMANDS:
        # Read, not imported: that takes seconds.
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        about = ast.get_docstring(ast.parse(source)) or ""
        first = about.partition("\n")[0].rstrip(".:")
        lines.append(f"  {name:<10} {first}")
    return "\n".join([*lines, "", "thundersync COMMAND --help lists its flags."])


if __name__ == "__main__":
    main()
