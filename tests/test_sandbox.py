"""A sandbox runs commands and moves files, and nothing of it is left behind."""

import asyncio
import contextlib
import gc
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from sandboxes import (
    PROVIDERS,
    RUN_ID,
    SMALL,
    asynchronous,
    every_provider,
    gone,
    processes,
    started,
)

from thundersync_jax.errors import ConfigError
from thundersync_jax.sandbox import archive, cgroups
from thundersync_jax.sandbox.base import (
    FileError,
    Limits,
    Output,
    SandboxError,
    Spec,
)
from thundersync_jax.sandbox.bubblewrap import Bubblewrap

here = PROVIDERS[0].marks[0]
PACKAGE = pathlib.Path(__file__).parents[1]


@every_provider
@asynchronous
async def test_check_says_how_limits_are_kept(make):
    said = await make(RUN_ID).check()
    assert "memory" in said and "processes" in said


@every_provider
@asynchronous
async def test_status_output_and_order(make):
    async with started(make) as sandbox:
        result = await sandbox.run("echo a; echo b >&2; echo c; exit 3")
        assert (result.status, result.output) == (3, b"a\nb\nc\n")
        assert not result.timed_out and result.cut_bytes == 0 and result.secs < 10
        assert (await sandbox.run(["printf", "%s", "a b;$HOME"])).output == b"a b;$HOME"


@every_provider
@asynchronous
async def test_what_bytes_come_are_what_bytes_were_written(make):
    async with started(make) as sandbox:
        result = await sandbox.run(r"printf '\xff\x00\xfe\x1b[31m\r\n'")
        assert result.output == b"\xff\x00\xfe\x1b[31m\r\n"


@every_provider
@asynchronous
async def test_commands_that_are_none(make):
    async with started(make) as sandbox:
        assert (await sandbox.run("")).status == 0
        assert (await sandbox.run("no_such_program_here")).status == 127
        result = await sandbox.run(["no_such_program_here"])
        assert result.status == 127 and b"no_such_program_here" in result.output
        assert (await sandbox.run(["/etc/passwd"])).status == 126
        assert (await sandbox.run("x" * 300_000)).status == 126  # too long for Linux
        assert (await sandbox.run("echo a\0b")).status == 126
        for none in ([], [""]):
            with pytest.raises(ValueError, match="expected a program's name"):
                await sandbox.run(none)


@every_provider
@asynchronous
async def test_a_signal_is_a_status(make):
    async with started(make) as sandbox:
        for name, number in (("KILL", 9), ("TERM", 15), ("SEGV", 11)):
            assert (await sandbox.run(f"kill -{name} $$")).status == 128 + number
        # Python, which enters the sandbox, ignores broken pipes; commands do not.
        assert (
            await sandbox.run("yes | head -n 1; exit ${PIPESTATUS[0]}")
        ).status == 141


@every_provider
@asynchronous
async def test_input_of_any_size(make):
    async with started(make) as sandbox:
        data = os.urandom(3_000_000)
        result = await sandbox.run("wc -c", stdin=data)
        assert int(result.output) == len(data)
        assert (await sandbox.run("cat", stdin=b"")).output == b""
        assert (await sandbox.run("bash -s", stdin=b"echo from stdin")).output == (
            b"from stdin\n"
        )


@every_provider
@asynchronous
async def test_folder_variables_and_user_of_a_command(make):
    async with started(make, env={"A": "spec", "B": "spec"}) as sandbox:
        await sandbox.run("mkdir -p sub")
        show = "pwd; echo $A $B; id -un; echo $HOME; umask"
        result = await sandbox.run(show, cwd="sub", env={"B": "run"})
        assert result.output == b"/workspace/sub\nspec run\nagent\n/home/agent\n0022\n"
        result = await sandbox.run("true", cwd="/no/such")
        assert result.status == 126 and b"/no/such" in result.output
        # Nothing of this process's own environment.
        assert b"PYTHON" not in (await sandbox.run("env")).output


@every_provider
@asynchronous
async def test_output_keeps_head_and_tail_and_counts_the_rest(make):
    async with started(make) as sandbox:
        result = await sandbox.run("seq 1 100000", most_bytes=100)
        whole = "".join(f"{i}\n" for i in range(1, 100_001)).encode()
        assert result.output == whole[:50] + whole[-50:]
        assert (result.head_bytes, result.cut_bytes) == (50, len(whole) - 100)


def test_output_is_the_whole_or_head_and_tail_however_it_comes():
    rng = random.Random(0)
    whole = rng.randbytes(5000)
    for most in (1, 2, 99, 4999, 5000, 5001, 10_000):
        output, at = Output(most), 0
        while at < len(whole):
            size = rng.choice([1, 7, 64, 3000])
            output.add(whole[at : at + size])
            at += size
        result = output.result(0, 0.0, False)
        half = max(most // 2, 1)
        if len(whole) <= 2 * half:
            assert (result.output, result.cut_bytes) == (whole, 0)
        else:
            assert result.output == whole[:half] + whole[-half:]
            assert result.cut_bytes == len(whole) - 2 * half


@every_provider
@asynchronous
async def test_time_is_up(make):
    async with started(make) as sandbox:
        result = await sandbox.run(
            "echo before; sleep 50.5; echo after", timeout_secs=0.3
        )
        assert result.timed_out and result.output == b"before\n"
        assert 0.3 <= result.secs < 10 and result.status == 137
        assert (await sandbox.run("ps -eo args")).output.count(b"sleep") == 0
        assert (await sandbox.run("echo next")).output == b"next\n"


@every_provider
@asynchronous
async def test_background_processes_live_on_and_are_read(make):
    """What they write after their command neither blocks nor ends them."""
    flood = "while :; do head -c 200000 /dev/zero && date +%N > beat; sleep 0.02; done"
    async with started(make) as sandbox:
        result = await sandbox.run(f"({flood}) & echo $!")
        number = int(result.output.split(b"\n")[0].strip(b"\0"))
        beats = set()
        for _ in range(5):
            beats.add((await sandbox.run("cat beat; sleep 0.1")).output)
        assert len(beats) == 5
        # A later command that is killed takes nothing of an earlier one with it.
        assert (await sandbox.run("sleep 50.5", timeout_secs=0.1)).timed_out
        assert (await sandbox.run(f"kill -0 {number}")).status == 0
        await sandbox.write("kept", b"kept")
        await sandbox.kill_all()
        assert (await sandbox.run(f"kill -0 {number}")).status == 1
        assert await sandbox.read("kept") == b"kept"


@every_provider
@asynchronous
async def test_commands_take_turns(make):
    async with started(make) as sandbox:
        line = "echo >> log; wc -l < log; sleep 0.05; wc -l < log"
        results = await asyncio.gather(*(sandbox.run(line) for _ in range(4)))
        assert all(len(set(r.output.split())) == 1 for r in results)


@every_provider
@asynchronous
async def test_files(make):
    async with started(make) as sandbox:
        data = os.urandom(200_000)
        await sandbox.write("deep/in/file", data)
        assert (
            await sandbox.read("/workspace/deep/in/file", most_bytes=len(data)) == data
        )
        assert (await sandbox.run("stat -c %U%a deep deep/in/file")).output == (
            b"agent755\nagent644\n"
        )
        await sandbox.write("deep/in/file", b"", mode=0o755)
        assert await sandbox.read("deep/in/file") == b""
        with pytest.raises(FileError, match="more than 10 bytes"):
            await sandbox.write("long", bytes(11))
            await sandbox.read("long", most_bytes=10)
        await sandbox.run("mkfifo pipe; ln -s /dev/zero zero; ln -s loop loop")
        for path in ("missing", "deep", "pipe", "zero", "loop", "a\0b", "/proc/self/x"):
            with pytest.raises(FileError):
                await asyncio.wait_for(sandbox.read(path), 20)
        for path in ("deep", "pipe", "loop", "/usr/bin/x", "/etc/passwd", "long/x"):
            with pytest.raises(FileError):
                await asyncio.wait_for(sandbox.write(path, b"x"), 20)
        # Files that their owner has closed are open to whoever runs the sandbox.
        await sandbox.run("echo secret > closed; chmod 0 closed")
        assert await sandbox.read("closed") == b"secret\n"


@every_provider
@asynchronous
async def test_root_of_the_sandbox_has_files_of_its_own(make):
    async with started(make) as sandbox:
        if not sandbox.has_root:
            with pytest.raises(ValueError, match="has no root"):
                await sandbox.run("true", user="root")
            return
        await sandbox.write("/tmp/tests/x", b"hidden", user="root", mode=0o600)
        assert (await sandbox.run("cat /tmp/tests/x")).status == 1
        assert (await sandbox.run("rm -rf /tmp/tests")).status == 1
        result = await sandbox.run("id -un; cat /tmp/tests/x", user="root")
        assert result.output == b"root\nhidden"
        await sandbox.run("echo mine > mine; chmod 0 mine")
        assert (await sandbox.run("cat mine", user="root")).output == b"mine\n"


@every_provider
@asynchronous
async def test_folders_there_and_back(make, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "big").write_bytes(os.urandom(2_000_000))
    (source / "tool").write_text("#!/bin/sh\necho works\n")
    (source / "tool").chmod(0o755)
    (source / "link").symlink_to("sub/big")
    os.link(source / "tool", source / "twin")
    (source / os.fsdecode(b"n\xff")).write_bytes(b"name")
    async with started(make) as sandbox:
        await sandbox.copy_in(source, "in")
        assert (await sandbox.run("in/tool; in/twin")).output == b"works\nworks\n"
        assert (await sandbox.run("stat -c %U in/tool")).output == b"agent\n"
        copied = await sandbox.copy_out("in", tmp_path / "back")
        assert copied.left_out == ()
    back = tmp_path / "back"
    for path in source.rglob("*"):
        other = back / path.relative_to(source)
        assert path.is_symlink() == other.is_symlink()
        if path.is_file():
            assert path.read_bytes() == other.read_bytes()
            assert path.stat().st_mode == other.stat().st_mode


@every_provider
@asynchronous
async def test_a_single_file_is_copied_under_its_name(make, tmp_path):
    async with started(make) as sandbox:
        await sandbox.write("a/b", b"content")
        await sandbox.copy_out("a/b", tmp_path)
    assert (tmp_path / "b").read_bytes() == b"content"


@every_provider
@asynchronous
async def test_copies_that_cannot_be(make, tmp_path):
    async with started(make) as sandbox:
        await sandbox.run("mkdir many; seq 1 50 | (cd many; xargs touch)")
        with pytest.raises(FileError, match="more than 20 files"):
            await sandbox.copy_out("many", tmp_path / "a", most_files=20)
        await sandbox.run("head -c 100000 /dev/zero > large")
        with pytest.raises(FileError, match="more than 1000 bytes"):
            await sandbox.copy_out("large", tmp_path / "b", most_bytes=1000)
        with pytest.raises(FileError):
            await sandbox.copy_out("missing", tmp_path / "c")
        with pytest.raises(OSError, match="missing"):
            await sandbox.copy_in(tmp_path / "missing", "x")
        (tmp_path / "more").write_bytes(bytes(20_000_000))
        (tmp_path / "more2").write_bytes(bytes(20_000_000))
        with pytest.raises(FileError):
            await sandbox.copy_in(tmp_path, "x")  # than the disk has
        assert (await sandbox.run("echo still here")).output == b"still here\n"


@here
@asynchronous
async def test_a_root_folder_is_the_whole_root(tmp_path_factory):
    """Of a root of links to the host's /usr, its own files are seen, and unchanged."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        root = pathlib.Path(folder)
        root.chmod(0o755)
        subprocess.run(
            ["bash", "-c", "mkdir -p etc opt usr; cp -a /bin /lib /lib64 /sbin ."],
            cwd=root,
            check=True,
        )
        copied = ["bash", "cat", "ls", "touch"]
        (root / "usr/bin").mkdir()
        for name in copied:
            subprocess.run(
                ["cp", "-L", f"/usr/bin/{name}", root / "usr/bin"], check=True
            )
            libraries = subprocess.run(
                ["ldd", f"/usr/bin/{name}"], capture_output=True, text=True, check=True
            ).stdout
            for word in libraries.split():
                if word.startswith("/"):
                    place = root / os.path.realpath(os.path.dirname(word))[1:]
                    place.mkdir(parents=True, exist_ok=True)
                    subprocess.run(["cp", "-L", word, place], check=True)
        (root / "opt/marker").write_text("of the root")
        async with started(Bubblewrap, root=root, workdir="/app") as sandbox:
            result = await sandbox.run("cat /opt/marker; pwd; ls /usr/bin")
            assert result.output.startswith(b"of the root/app\n")
            assert set(result.output.split()[3:]) == {n.encode() for n in copied}
            assert (await sandbox.run("touch /opt/x")).status == 1
            await sandbox.write("file", b"x")
            assert await sandbox.read("/app/file") == b"x"
        assert [path.name for path in (root / "opt").iterdir()] == ["marker"]


def test_specs_and_names_that_cannot_be():
    for path in ("work", "/", "/a/../b", "//a", "/a/"):
        for spec in ({"workdir": path}, {"folders": ("/ok", path)}):
            with pytest.raises(ConfigError, match="folder of a sandbox is"):
                Spec(**spec)
    with pytest.raises(ConfigError, match="memory_mb is 0"):
        Limits(memory_mb=0)
    with pytest.raises(ConfigError, match="run id"):
        Bubblewrap("a.b")
    for name in ("../x", "a.b", ""):
        with pytest.raises(ConfigError, match="expected letters"):
            Bubblewrap("a").create(Spec(), name)
    with pytest.raises(ConfigError, match="no images"):
        Bubblewrap("a").create(Spec(image="debian"), "x")


@asynchronous
async def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install the package bubblewrap"):
        await Bubblewrap("a").check()


@asynchronous
async def test_systems_that_cannot_are_named(monkeypatch):
    for name, value in (("system", "Darwin"), ("release", "4.18.0-el8")):
        with monkeypatch.context() as patch:
            patch.setattr(f"platform.{name}", lambda value=value: value)
            with pytest.raises(ConfigError, match=f"Linux 5.9 or newer.*{value}"):
                await Bubblewrap("a").check()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="'riscv64'"):
        await Bubblewrap("a").check()


@here
@asynchronous
async def test_forbidden_namespaces_are_named(monkeypatch, tmp_path):
    """A bubblewrap that the kernel refuses, as an unprivileged one is refused."""
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n"
    )
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"apparmor_restrict_unprivileged_userns"):
        await Bubblewrap("a").check()


@every_provider
@asynchronous
async def test_a_stopped_sandbox_is_a_fault_of_the_infrastructure(make):
    async with started(make) as sandbox:
        running = asyncio.ensure_future(sandbox.run("sleep 50.5"))
        await asyncio.sleep(0.2)
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await running
        for call in (sandbox.run("true"), sandbox.read("x"), sandbox.kill_all()):
            with pytest.raises(SandboxError):
                await call
        await sandbox.stop()
        with pytest.raises(SandboxError):
            await sandbox.start()


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@every_provider
@asynchronous
async def test_cancelled_at_any_moment_nothing_is_left(make, tmp_path):
    """A hundred times, while it starts, runs, copies or stops."""
    rng = random.Random(1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(bytes(3_000_000))

    async def life(sandbox, has_started):
        await sandbox.start()
        has_started.set()
        await sandbox.run("sleep 54.321 & true")
        await sandbox.copy_in(tmp_path / "source", "in")
        await sandbox.copy_out("in", tmp_path / "out")
        await sandbox.run("sleep 54.321")

    async def one(number):
        sandbox = make(RUN_ID).create(Spec(limits=SMALL), f"cancelled{number}")
        has_started = asyncio.Event()
        task = asyncio.ensure_future(life(sandbox, has_started))
        await asyncio.sleep(rng.choice([0.02, 0.1, 0.4]) * rng.random())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not has_started.is_set():
            return  # a start that did not come to its end cleans up by itself
        stop = asyncio.ensure_future(sandbox.stop())
        await asyncio.sleep(0.01 * rng.random())
        stop.cancel()  # also a stop is cancelled, and finished
        with contextlib.suppress(asyncio.CancelledError):
            await stop

    await one(-1)
    before, threads = descriptors(), threading.active_count()
    for first in range(0, 100, 4):
        await asyncio.gather(*(one(first + i) for i in range(4)))
    assert await gone("54.321") and await gone(f"thundersync.{RUN_ID}.")
    assert not cgroups.left(f"thundersync.{RUN_ID}.")
    await asyncio.sleep(0.1)
    assert descriptors() <= before
    assert threading.active_count() <= threads + 2 + 4  # the executor's few


@every_provider
@asynchronous
async def test_a_cancelled_command_is_dead_when_its_caller_knows(make):
    async with started(make) as sandbox:
        for secs in (0.0, 0.01, 0.03, 0.05, 0.2, 1.0):
            task = asyncio.ensure_future(sandbox.run("sleep 53.21"))
            await asyncio.sleep(secs)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not processes("53.21")
        assert (await sandbox.run("echo on")).output == b"on\n"


TRAINER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from sandboxes import *

async def main():
    provider = {make}({run_id!r})
    async def one(number):
        while True:
            sandbox = provider.create(Spec(limits=SMALL), f"killed{{number}}")
            await sandbox.start()
            await sandbox.run("setsid sleep 52.109 & sleep 0.3")
            print("ran", flush=True)
            await sandbox.run("trap '' TERM INT HUP; sleep 52.109 & sleep {secs}")
            await sandbox.stop()
    await asyncio.gather(*map(one, range(6)))

asyncio.run(main())
"""


@every_provider
@asynchronous
async def test_a_killed_trainer_leaves_nothing_alive(make):
    run_id = f"{RUN_ID}k"
    rng = random.Random(2)
    for secs in (0.1, 52.109, 0.0):
        code = TRAINER.format(
            tests=str(PACKAGE / "tests"), make=make.__name__, run_id=run_id, secs=secs
        )
        env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        trainer = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE
        )
        trainer.stdout.readline()
        time.sleep(rng.random() * 0.5)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
        assert await gone("52.109") and await gone(f"thundersync.{run_id}.")
    await make(run_id).reap()
    assert not cgroups.left(f"thundersync.{run_id}.")


@every_provider
@asynchronous
async def test_what_lives_is_not_reaped(make):
    async with started(make) as sandbox:
        await make(RUN_ID).reap()
        assert (await sandbox.run("echo alive")).output == b"alive\n"


@here
@asynchronous
async def test_sandboxes_beside_each_other_see_nothing_of_each_other():
    async with started(Bubblewrap) as one, started(Bubblewrap) as other:
        await one.run("echo mine > /tmp/x; sleep 51.9 &")
        assert (await other.run("cat /tmp/x /var/tmp/x /dev/shm/x")).status == 1
        assert b"51.9" not in (await other.run("ps -eo args")).output


def test_archives_of_this_side_are_read_by_this_side(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "x" / "y").mkdir(parents=True)
    (source / "x" / "up").symlink_to("../x/y")
    (source / "x" / "out").symlink_to("../../etc")
    with open(tmp_path / "tar", "wb") as file:
        archive.pack(source, file, 1 << 20, 100)
    with open(tmp_path / "tar", "rb") as file:
        _, left_out = archive.unpack(file, target, 1 << 20, 100)
    assert os.readlink(target / "x" / "up") == "../x/y"
    assert left_out == ["./x/out"]
