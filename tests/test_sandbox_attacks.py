"""What an agent may try against its host, its neighbours and its sandbox, tried.

Each attack was seen to succeed once with the protection against it taken away.
"""

import asyncio
import contextlib
import io
import os
import pathlib
import pty
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time

import pytest
from sandboxes import (
    RUN_ID,
    SMALL,
    asynchronous,
    every_provider,
    gone,
    processes,
    started,
)

from thundersync_jax.sandbox import archive
from thundersync_jax.sandbox.base import FileError, Limits

PACKAGE = pathlib.Path(__file__).parents[1]
SECRET = "tell-nobody-71e5"
GROWTH_BYTES = 64 << 20  # of this process, whatever an agent does
MUST = {"timeout_secs": 20.0}


def resident_bytes():
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def python(code):
    return ["python3", "-c", code]


async def usable(sandbox):
    """Whether commands and files work, as after nothing had happened."""
    result = await sandbox.run("echo fine")
    await sandbox.write("/tmp/usable", b"fine")
    return result.output == b"fine\n" and await sandbox.read("/tmp/usable") == b"fine"


# The host: files, processes, network.


@every_provider
@asynchronous
async def test_files_of_the_host_are_not_there(make, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", SECRET)
    (tmp_path / "secret").write_text(SECRET)
    own = os.getpid()
    places = [
        *("/etc/shadow", "/root/.bashrc", "/root/.ssh", str(tmp_path), str(PACKAGE)),
        *("/proc/1/root/etc/shadow", "/proc/1/environ", f"/proc/{own}/environ"),
        *(f"/proc/{own}/root/etc/shadow", "/sys/kernel", "/dev/mem", "/dev/kmsg"),
        *("/proc/kcore", "/run", "/boot", "/mnt", "/opt"),
    ]
    async with started(make) as sandbox:
        for place in places:
            result = await sandbox.run(f"cat {place}; ls -A {place}/. ")
            assert result.status != 0, place
        result = await sandbox.run(
            f"cat /proc/*/environ | tr '\\0' '\\n' | grep {SECRET}"
        )
        assert result.status == 1
        result = await sandbox.run("ls /home /home/*; cat /proc/[0-9]*/cmdline")
        assert b"pytest" not in result.output
        for path in ("/etc/shadow", f"/proc/{own}/environ", str(tmp_path / "secret")):
            with pytest.raises(FileError):
                await sandbox.read(path)


SOCKETS = """
import socket, sys
def tried(name, function):
    try:
        function()
        print(name)
    except OSError as error:
        print("no", name, error, file=sys.stderr)
def tcp():
    socket.create_connection(("127.0.0.1", {tcp}), timeout=3)
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("127.0.0.1", {udp}))
        s.settimeout(3)
        s.send(b"hello")
        s.recv(10)
def abstract():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("\\0" + {abstract!r})
def named():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect({named!r})
def route():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("1.1.1.1", 53))
def dns():
    socket.getaddrinfo("example.com", 80)
for f in (tcp, udp, abstract, named, dns, route):
    tried(f.__name__, f)
"""


@contextlib.contextmanager
def listening(tmp_path):
    """Servers of the host, one of each kind; UDP answers."""
    abstract = f"thundersync-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(socket.socket(*kind))
            for kind in (
                *((socket.AF_INET,), (socket.AF_INET, socket.SOCK_DGRAM)),
                *((socket.AF_UNIX,), (socket.AF_UNIX,)),
            )
        ]
        addresses = [("127.0.0.1", 0)] * 2 + [f"\0{abstract}", str(tmp_path / "s")]
        for one, address in zip(made, addresses, strict=True):
            one.bind(address)
            if one.type == socket.SOCK_STREAM:
                one.listen()
        made[1].settimeout(0.05)
        ended = threading.Event()

        def echo():
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    made[1].sendto(*made[1].recvfrom(10))

        thread = threading.Thread(target=echo)
        thread.start()
        try:
            ports = {"tcp": made[0].getsockname()[1], "udp": made[1].getsockname()[1]}
            yield {**ports, "abstract": abstract, "named": str(tmp_path / "s")}
        finally:
            ended.set()
            thread.join()


@every_provider
@asynchronous
async def test_no_network(make, tmp_path):
    with listening(tmp_path) as addresses:
        code = python(SOCKETS.format(**addresses))
        async with started(make) as sandbox:
            result = await sandbox.run(code)
            assert result.status == 0
            words = [line for line in result.output.splitlines() if b"no " not in line]
            assert words == []
        # The same code finds them where the network is allowed.
        async with started(make, network=True) as sandbox:
            found = (await sandbox.run(code)).output.split(b"\n")
            assert {b"tcp", b"udp", b"abstract"} <= set(found)
            assert b"named" not in found


@every_provider
@asynchronous
async def test_nothing_is_written_outside(make):
    places = ["/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/var", "/home"]
    names = [str(pathlib.Path(place, "attack-71e5")) for place in places]
    async with started(make) as sandbox:
        users = (None, "root") if sandbox.has_root else (None,)
        for user in users:
            for name in names:
                assert (await sandbox.run(["touch", name], user=user)).status == 1, name
            for line in (
                # Opened and not written: an attack that succeeds changes nothing.
                ": >> /proc/sys/kernel/core_pattern",
                ": >> /proc/sys/user/max_user_namespaces",
                ": >> /proc/sys/kernel/hostname",
                ": >> /proc/sysrq-trigger",
                "! grep -q ' /proc/sys proc ro' /proc/mounts",
                "rm /bin /lib64 /lib",
                "ln -sf /workspace/x /bin",
                "mv /etc /etc2",
                "rm -rf /usr/bin/env",
                "chmod 777 / /etc /usr",
                "mknod /tmp/disk b 8 0",
                "mkdir -p /workspace/m && mount -t tmpfs none /workspace/m",
                "mount -o remount,rw /",
                "umount /usr || umount -l /etc || exit 1",
                "chroot /workspace true",
                "nsenter -t 1 -m true",
                "hostname attacked",
            ):
                result = await sandbox.run(line, user=user)
                assert result.status != 0, (user, line)
        assert await usable(sandbox)
    assert not any(map(os.path.exists, names))


@every_provider
@asynchronous
async def test_no_privilege_is_gained(make):
    tries = {
        "unshare -U true": "a user namespace",
        "unshare -Ur true": "a user namespace",
        "unshare -m true": "a mount namespace",
        "unshare -n true": "a network namespace",
        "unshare -p --fork true": "a pid namespace",
        "setpriv --reuid 0 true": "another user",
        "su -c true": "a set-user-ID program",
    }
    async with started(make) as sandbox:
        for line, what in tries.items():
            assert (await sandbox.run(line)).status != 0, what
        status = (await sandbox.run("cat /proc/self/status")).output.decode()
        lines = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(lines[name], 16) == 0
        assert lines["NoNewPrivs"] == "1" and lines["Seccomp"] == "2"
        # A program that says it is root's is nobody's.
        await sandbox.run("cp /usr/bin/id sid; chmod 6755 sid")
        assert b"euid" not in (await sandbox.run("./sid")).output
        if sandbox.has_root:
            await sandbox.run(
                "cp /usr/bin/id /tmp/rid; chmod 6755 /tmp/rid", user="root"
            )
            assert b"euid" not in (await sandbox.run("/tmp/rid")).output
            result = await sandbox.run("grep Cap /proc/self/status", user="root")
            assert b"CapEff:\t00000000000000eb" in result.output


TRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
found = []
def tried(name, result):
    if result is not None and result >= 0:
        found.append(name)
tried("attach", libc.ptrace(16, 1, 0, 0))
tried("seize", libc.ptrace(0x4206, 1, 0, 0))
pidfd = os.pidfd_open(1)
for fd in range(10):
    tried("getfd", libc.syscall(438, pidfd, fd, 0))
def opened(path):
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None
for path in ("mem", "environ", "fd/0", "fd/1", "root/etc", "ns/mnt", "cwd/etc", "maps"):
    tried(path, opened("/proc/1/" + path))
print(*found)
"""


@every_provider
@asynchronous
async def test_the_holder_cannot_be_traced_or_killed(make):
    async with started(make) as sandbox:
        users = (None, "root") if sandbox.has_root else (None,)
        for user in users:
            result = await sandbox.run(python(TRACE), user=user)
            assert (result.status, result.output) == (0, b"\n")
            line = "for s in 9 15 19 1 2 3; do kill -$s 1; done; kill -9 -1; true"
            await sandbox.run(line, user=user)
            assert await usable(sandbox)


@every_provider
@asynchronous
async def test_no_descriptor_is_left_open(make, tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    with open(path) as file:
        os.set_inheritable(file.fileno(), True)
        async with started(make) as sandbox:
            line = "for f in /proc/self/fd/*; do readlink $f; done; cat <&3; true"
            result = await sandbox.run(["bash", "-c", line])
            assert SECRET.encode() not in result.output
            listed = await sandbox.run(
                python("import os; print(os.listdir('/proc/self/fd'))")
            )
            assert eval(listed.output) == ["0", "1", "2", "3"]  # 3 lists the folder


TERMINAL = """
import asyncio, fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.path.insert(0, {tests!r})
from sandboxes import *
assert open("/dev/tty").isatty()
code = '''
import fcntl, os, termios
for path in ("/dev/tty", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"):
    try:
        fcntl.ioctl(os.open(path, os.O_RDWR), termios.TIOCSTI, b"x")
        print("pushed", path)
    except OSError:
        pass
'''
async def main():
    async with started({make}) as sandbox:
        result = await sandbox.run(["python3", "-c", code])
        print("tried", result.status, result.output)
asyncio.run(main())
"""


@every_provider
def test_no_terminal_to_type_into(make):
    """The trainer has one; its agents do not."""
    code = TERMINAL.format(tests=str(PACKAGE / "tests"), make=make.__name__)
    terminal, inside = pty.openpty()
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        start_new_session=True,
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    said = b""
    with contextlib.suppress(OSError):  # at its end
        while more := os.read(terminal, 1000):
            said += more
    os.close(terminal)
    assert trainer.wait() == 0, said
    assert b"tried 0 b''" in said, said


KEYS = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
add, request, keyctl = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[
    platform.machine()
]
print(
    libc.syscall(add, b"user", b"attack", b"x", 1, -3),
    libc.syscall(keyctl, 0, -3, 0),
    libc.syscall(request, b"user", b"secret", None, 0),
)
"""


@every_provider
@asynchronous
async def test_no_keyring(make):
    async with started(make) as sandbox:
        assert (await sandbox.run(python(KEYS))).output == b"-1 -1 -1\n"


# Floods.


@every_provider
@asynchronous
async def test_a_fork_bomb_ends_with_its_command(make):
    bomb = "f() { f | f & }; f; sleep 60"
    async with started(make) as sandbox, started(make) as other:
        running = asyncio.ensure_future(sandbox.run(bomb, timeout_secs=2.0))
        await asyncio.sleep(1.0)
        assert (await other.run("echo alive", **MUST)).output == b"alive\n"
        ours = await other.run("ps -e | wc -l")
        assert int(ours.output) < 10
        result = await asyncio.wait_for(running, 30)
        assert result.timed_out
        await sandbox.kill_all()
        assert await usable(sandbox)


@every_provider
@asynchronous
async def test_so_many_processes_and_no_more(make):
    code = """
import os, time
n = 0
try:
    while n < 1000:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        n += 1
except OSError:
    pass
print(n, flush=True)
"""
    async with started(make) as sandbox:
        result = await sandbox.run(python(code))
        assert 30 < int(result.output) < SMALL.processes
        # Its own next command may not fork; files and root's commands do not mind.
        await sandbox.write("file", b"x")
        if sandbox.has_root and not sandbox.limited().startswith("memory by cgroups"):
            assert (await sandbox.run("true | true", user="root")).status == 0
        await sandbox.kill_all()
        assert await usable(sandbox)


@every_provider
@asynchronous
async def test_ended_processes_do_not_add_up(make):
    """Orphans that nobody waits for, three times as many as may live."""
    code = """
import os
for _ in range(200):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
"""
    async with started(make) as sandbox:
        assert (await sandbox.run(python(code), **MUST)).status == 0
        assert (await sandbox.run("ps -eo stat= | grep -c Z")).output == b"0\n"


@every_provider
@asynchronous
async def test_memory_is_bounded_for_all_processes_together(make):
    code = (
        "x = bytearray({} << 20); print('had', flush=True); import time; time.sleep({})"
    )
    async with started(make, Limits(memory_mb=128, disk_mb=16)) as sandbox:
        result = await sandbox.run(python(code.format(1024, 0)), **MUST)
        assert result.status != 0 and b"had" not in result.output
        if "memory by cgroups" in sandbox.limited():
            one = f'python3 -c "{code.format(64, 5)}"'
            line = " & ".join([one] * 6) + "; wait"
            result = await sandbox.run(line, **MUST)
            assert 0 < result.output.split().count(b"had") < 5
        assert await usable(sandbox)


@every_provider
@asynchronous
async def test_the_disk_is_bounded_for_all_folders_together(make):
    async with started(make) as sandbox:
        folders = ("/workspace", "/tmp", "/var/tmp", "/dev/shm", "$HOME")
        fill = "; ".join(
            f"head -c 10M /dev/zero > {folder}/fill{i}"
            for folder in folders
            for i in (1, 2)
        )
        result = await sandbox.run(f"{fill}; cat /*/fill* /*/*/fill* | wc -c")
        assert b"No space left" in result.output
        assert int(result.output.split()[-1]) <= SMALL.disk_mb << 20
        with pytest.raises(FileError):
            await sandbox.write("more", bytes(10 << 20))
        await sandbox.run("rm -f /*/fill* /*/*/fill*")
        big = await sandbox.run("head -c 30M /dev/zero > big")
        assert big.status == 128 + 25 or b"File too large" in big.output
        files = "i=0; while : > f$i; do i=$((i+1)); done 2>/dev/null; echo $i"
        assert int((await sandbox.run(f"rm big; {files}", **MUST)).output) < 10_000
        assert (await sandbox.run("rm -rf /workspace/*")).status == 0
        assert await usable(sandbox)


@every_provider
@asynchronous
async def test_processor_time_is_bounded(make):
    async with started(make, Limits(cpu_secs=1)) as sandbox:
        result = await sandbox.run("while :; do :; done", timeout_secs=30)
        assert result.status in (128 + 9, 128 + 24) and not result.timed_out


@every_provider
@asynchronous
async def test_a_flood_of_output_fills_nothing_and_delays_nobody(make):
    async with started(make) as sandbox:
        before, worst, spent = resident_bytes(), 0.0, time.process_time()
        for line in ("yes", "yes & yes >&2 & disown; sleep 0.5"):
            running = asyncio.ensure_future(sandbox.run(line, timeout_secs=2.0))
            while not running.done():
                began = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - began)
            result = running.result()
            assert result.cut_bytes > 1_000_000 and len(result.output) == 100_000
        assert time.process_time() - spent < 2.0
        # The second goes on, and nobody reads it here.
        spent = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - spent < 0.2
        assert resident_bytes() - before < GROWTH_BYTES
        assert worst < 0.5


# Time, and processes that would outlive it.

STUBBORN = """
trap '' TERM INT HUP QUIT
(setsid bash -c "trap '' TERM; sleep 59.87" &)
nohup sleep 59.87 &
python3 -c 'import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.chdir("/")
        time.sleep(0.1)
        os.execve("/usr/bin/sleep", ["sleep", "59.87"], {})
    os._exit(0)'
sleep 59.87
"""


@every_provider
@asynchronous
async def test_a_command_over_its_time_dies_with_all_its_children(make):
    async with started(make) as sandbox:
        await sandbox.run("sleep 58.76 & true")
        began = time.monotonic()
        result = await sandbox.run(STUBBORN, timeout_secs=1.0)
        assert result.timed_out and time.monotonic() - began < 10
        assert not processes("59.87")
        assert processes("58.76")


@every_provider
@asynchronous
async def test_no_mark_is_taken_off(make):
    """A process that changes what it can of itself is still its command's."""
    code = """
import os, resource, time
soft, hard = resource.getrlimit(10)
for most in (hard + 1, -1, hard - 5):
    try:
        resource.setrlimit(10, (most, most))
    except (OSError, ValueError):
        print("refused", flush=True)
if os.fork() == 0:
    os.setsid()
    os.execv("/usr/bin/sleep", ["sleep", "57.65"])
time.sleep(57.65)
"""
    async with started(make) as sandbox:
        result = await sandbox.run(python(code), timeout_secs=1.0)
        assert result.timed_out and result.output == b"refused\n" * 2
        assert not processes("57.65")


CHAIN = """
import os
os.setsid()
for _ in range(3):
    os.fork()
while True:
    if os.fork():
        os._exit(0)
"""


@every_provider
@asynchronous
async def test_processes_that_flee_by_forking_are_caught(make):
    async with started(make) as sandbox:
        for _ in range(3):
            result = await sandbox.run(
                f"python3 -c '{CHAIN}' & sleep 60", timeout_secs=0.7
            )
            assert result.timed_out
            assert (await sandbox.run("ps -eo comm | grep -c python3")).output == b"0\n"


@every_provider
@asynchronous
async def test_processes_that_kill_everything_are_killed(make):
    """Also those that are about to enter, and those that come to kill them."""
    code = "import os\nwhile True:\n try: os.kill(-1, 9)\n except OSError: pass"
    async with started(make) as sandbox:
        await sandbox.run(
            ["bash", "-c", f"exec setsid python3 -c '{code}' & sleep 0.2"]
        )
        # The next commands may die of it: that is what the agent did.
        assert (await sandbox.run("sleep 0.3; echo x")).status in (0, 137)
        for _ in range(3):
            await sandbox.write("file", b"content")
            assert await sandbox.read("file") == b"content"
        await sandbox.kill_all()
        assert await usable(sandbox)


@every_provider
@asynchronous
async def test_nothing_outlives_kill_all_or_stop(make):
    line = "nohup setsid sleep 56.54 & (trap '' TERM; sleep 56.54 &) ; sleep 0.1"
    async with started(make) as sandbox:
        await sandbox.run(line)
        assert processes("56.54")
        await sandbox.kill_all()
        assert not processes("56.54")
        await sandbox.run(line)
    assert not processes("56.54")
    assert await gone(f"thundersync.{RUN_ID}.")


# Files in and out.


@every_provider
@asynchronous
async def test_shadowed_tools_are_not_used(make, tmp_path):
    """Files are read and written by none of the sandbox's programs or modules."""
    plant = r"""
for place in /workspace /home/agent /tmp; do
  for name in cat tar bash sh python3 python rm ls sleep; do
    printf '#!/bin/sh\necho attacked > /tmp/attacked\necho lies\n' > $place/$name
    chmod 755 $place/$name
  done
  for name in sitecustomize usercustomize tarfile encodings os archive warnings; do
    echo 'open("/tmp/attacked", "w").write("x"); print("lies")' > $place/$name.py
  done
done
mkdir -p ~/.local/lib/python3.11/site-packages ~/bin
cp /workspace/*.py ~/.local/lib/python3.11/site-packages
for name in .bashrc .profile .bash_profile .bash_login .bash_env; do
  echo 'echo attacked > /tmp/attacked; export PATH=/workspace' > ~/$name
done
echo truth > result
"""
    async with started(make) as sandbox:
        assert (await sandbox.run(plant)).status == 0
        assert await sandbox.read("result") == b"truth\n"
        await sandbox.write("in", b"truth")
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "f").write_bytes(b"truth")
        await sandbox.copy_in(tmp_path / "source", "copied")
        await sandbox.copy_out("copied", tmp_path / "out")
        assert (tmp_path / "out" / "f").read_bytes() == b"truth"
        await sandbox.kill_all()
        user = "root" if sandbox.has_root else None
        result = await sandbox.run("cat result", user=user, env={"A": "b"})
        assert result.output == b"truth\n"
        if sandbox.has_root:  # which starts in the agent's folder, but has its own home
            result = await sandbox.run(["python3", "-c", "print('truth')"], user="root")
            assert result.output == b"truth\n"
        with pytest.raises(FileError):
            await sandbox.read("/tmp/attacked")


@every_provider
@asynchronous
async def test_links_and_dots_resolve_inside(make, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("untouched")
    up = "../" * 20
    plant = f"""
ln -s /etc etc; ln -s {outside} outside; ln -s {up}{outside} up; ln -s / root
ln -s {outside}/victim file; mkdir -p d; ln -s .. d/dots; ln -s loop loop
"""
    async with started(make) as sandbox:
        await sandbox.run(plant)
        assert b"agent:x:1000" in await sandbox.read("etc/passwd")
        assert b"agent:x:1000" in await sandbox.read(f"{up}etc/passwd")
        for path in (f"{up}etc/shadow", "file", "up/victim", f"{outside}/victim"):
            with pytest.raises(FileError):
                await sandbox.read(path)
        for path in ("file", "outside/x", f"{up}{outside}/x", "etc/passwd"):
            with contextlib.suppress(FileError):
                await sandbox.write(path, b"attacked")
        # Nor does a path lead into what a process of the agent's has open.
        await sandbox.run("sleep 57.2 3</etc/passwd & echo $! > number")
        number = (await sandbox.read("number")).decode().strip()
        with pytest.raises(FileError):
            await sandbox.read(f"/proc/{number}/fd/3")
        source = tmp_path / "source"
        (source / "outside").mkdir(parents=True)
        (source / "outside" / "victim").write_text("attacked")
        with contextlib.suppress(FileError):
            await sandbox.copy_in(source, ".")
        # What leads out of the folder stays behind, what does not is kept.
        copied = await sandbox.copy_out(".", tmp_path / "out")
        assert {pathlib.Path(n).name for n in copied.left_out} >= {"etc", "up", "root"}
        assert os.readlink(tmp_path / "out" / "d" / "dots") == ".."
    for path in (tmp_path / "out").rglob("*"):
        real = pathlib.Path(os.path.realpath(path))
        assert real.is_relative_to(tmp_path / "out")
    assert (outside / "victim").read_text() == "untouched"
    assert [p.name for p in outside.iterdir()] == ["victim"]


@every_provider
@asynchronous
async def test_strange_files_are_copied_or_refused_in_time(make, tmp_path):
    plant = """
mkdir odd; cd odd; mkfifo pipe; python3 -c 'import socket
socket.socket(socket.AF_UNIX).bind("sock")'
truncate -s 10M sparse; touch "$(printf 'new\\nline')" "$(printf 'b\\xffd')" -- -rf
chmod 0 sparse; mkdir closed; touch closed/in; chmod 0 closed
"""
    deep = "import os\nfor _ in range(3000):\n os.mkdir('d'); os.chdir('d')"
    async with started(make) as sandbox:
        await sandbox.run(plant)
        copied = await sandbox.copy_out("odd", tmp_path / "odd")
        names = {os.fsencode(p.name) for p in (tmp_path / "odd").iterdir()}
        assert names == {b"sparse", b"new\nline", b"b\xffd", b"-rf", b"closed"}
        assert (tmp_path / "odd" / "closed" / "in").exists() and copied.files >= 6
        await sandbox.run(["mkdir", "deep"])
        await sandbox.run(python(deep), cwd="deep")
        with pytest.raises(FileError, match="folders in"):
            await sandbox.copy_out("deep", tmp_path / "deep")
        shutil.rmtree(tmp_path / "deep")  # as whoever asked for it will
        assert await usable(sandbox)


def stream(*members):
    """A tar stream of (name, type, link name, content)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind, link, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            member.mode = 0o6777
            tar.addfile(member, io.BytesIO(content))
    file.seek(0)
    return file


REG, SYM, LNK, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
HOSTILE = {
    "an absolute name": [("/{out}/x", REG, "", b"attacked")],
    "dots": [("a/../../out/x", REG, "", b"attacked")],
    "a hard link out": [("x", LNK, "../out/victim", b"")],
    "a hard link": [("a", REG, "", b"1"), ("x", LNK, "a", b"")],
    "through a link": [("d", SYM, "../out", b""), ("d/x", REG, "", b"attacked")],
    "through a link made twice": [
        ("d", SYM, "../out", b""),
        ("d", DIR, "", b""),
        ("d/x", REG, "", b"attacked"),
    ],
    "through an absolute link": [("d", SYM, "/{out}", b""), ("d/x", REG, "", b"a")],
    "links that add up": [
        ("a/b/c", DIR, "", b""),
        ("a/b/c/d", SYM, "../../..", b""),
        ("e", SYM, "a/b/c/d/../..", b""),
    ],
    "over a file": [("x", REG, "", b"1"), ("x/y", REG, "", b"2")],
    "devices": [("disk", tarfile.BLKTYPE, "", b""), ("null", tarfile.CHRTYPE, "", b"")],
    "a pipe": [("pipe", tarfile.FIFOTYPE, "", b"")],
    "the folder itself": [(".", SYM, "../out", b""), ("x", REG, "", b"1")],
    "folders without end": [("d/" * 3000 + "x", REG, "", b"1")],
    "no name": [("", REG, "", b"1")],
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_archives_stay_in_their_folder(attack, tmp_path):
    out, folder = tmp_path / "out", tmp_path / "folder"
    out.mkdir()
    (out / "victim").write_text("untouched")
    members = [
        (name.format(out=out), kind, link.format(out=out), content)
        for name, kind, link, content in HOSTILE[attack]
    ]
    with contextlib.suppress(archive.Refused):
        archive.unpack(stream(*members), folder, 1 << 20, 100)
    assert [(p.name, p.read_text()) for p in out.iterdir()] == [("victim", "untouched")]
    assert {p.name for p in tmp_path.iterdir()} == {"out", "folder"}
    for path in folder.rglob("*"):
        assert path.is_symlink() or path.is_file() or path.is_dir()
        assert path.resolve().is_relative_to(folder)
        assert path.stat().st_nlink == 1 or path.is_dir()
        assert not path.stat().st_mode & 0o7000


def test_archives_larger_than_said_are_refused(tmp_path):
    with pytest.raises(archive.Refused, match="more than 10 bytes"):
        archive.unpack(stream(("x", REG, "", bytes(11))), tmp_path, 10, 10)
    many = [(f"x{i}", REG, "", b"") for i in range(11)]
    with pytest.raises(archive.Refused, match="more than 10 files"):
        archive.unpack(stream(*many), tmp_path, 10, 10)
    whole = stream(("x", REG, "", bytes(5000))).getvalue()
    for size in (0, 100, 600, 3000):
        with pytest.raises(archive.Refused, match="no whole tar stream"):
            archive.unpack(io.BytesIO(whole[:size]), tmp_path / "cut", 1 << 20, 10)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_headers_larger_than_memory_are_not_read(kind, tmp_path):
    class Endless(io.RawIOBase):
        def __init__(self):
            header = tarfile.TarInfo("x")
            header.type, header.size = kind, 1 << 32  # more needs another header
            self.head, self.read_bytes = header.tobuf(), 0

        def read(self, size=-1):
            data, self.head = self.head[:size], self.head[size:]
            self.read_bytes += size
            assert self.read_bytes < 1 << 28
            return data + bytes(size - len(data))

    with pytest.raises(archive.Refused, match="a header of"):
        archive.unpack(Endless(), tmp_path, 1 << 20, 10)


# Somebody else than root.

ORDINARY = """
import asyncio, sys
sys.path[:0] = [{package!r}]
from thundersync_jax.sandbox.base import *
from thundersync_jax.sandbox.bubblewrap import Bubblewrap

async def main():
    provider = Bubblewrap("ordinary")
    await provider.check()
    sandbox = provider.create(Spec(limits=Limits(processes=64)), "one")
    await sandbox.start()
    assert not sandbox.has_root
    assert (await sandbox.run("id -u")).output == b"1000\\n"
    assert (await sandbox.run("unshare -Ur true; touch /x /usr/x")).status == 1
    assert (await sandbox.run(["python3", "-c", {trace!r}])).output == b"\\n"
    await sandbox.run("kill -9 1; kill -9 -1")
    bomb = await sandbox.run("f() {{ f | f & }}; f; sleep 60", timeout_secs=1.0)
    assert bomb.timed_out
    await sandbox.run("setsid sleep 55.43 & trap '' TERM; chmod 0 /tmp; sleep 0.1")
    await sandbox.write("/tmp/a/b", b"x")
    assert await sandbox.read("/tmp/a/b") == b"x"
    kill = "import os\\nwhile True:\\n try: os.kill(-1, 9)\\n except OSError: pass"
    await sandbox.run(["bash", "-c", f"exec setsid python3 -c '{{kill}}' & sleep 0.2"])
    await sandbox.kill_all()
    assert (await sandbox.run("ps -e | wc -l")).output == b"5\\n"
    await sandbox.stop()
    print("held")

asyncio.run(main())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("bwrap") is None,
    reason="only root can become somebody else, and bubblewrap is needed",
)
def test_it_holds_for_an_ordinary_user(tmp_path_factory):
    folder = pathlib.Path("/var/tmp") / f"{RUN_ID}-package"
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        for name in ("sandbox", "__init__.py", "errors.py"):
            source, target = (
                PACKAGE / "thundersync_jax" / name,
                folder / "thundersync_jax",
            )
            if source.is_dir():
                shutil.copytree(source, target / name, ignore=ignored)
            else:
                target.mkdir(exist_ok=True)
                shutil.copy(source, target)
        done = subprocess.run(
            [
                shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3",
                *("-B", "-c", ORDINARY.format(package=str(folder), trace=TRACE)),
            ],
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        shutil.rmtree(folder)
    assert done.stdout == "held\n", done.stderr
