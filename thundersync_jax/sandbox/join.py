"""Enters a sandbox and does one thing there: a program of its own, without the package.

It runs as `python -I -S -c … REQUEST REPORT`, with the code of this file and what is
asked of it behind the descriptor REQUEST, and writes lines to REPORT: `ok …`, `no …`
for what the sandbox's files do not allow, `failed …` for everything else. Files are
read and written by this program, not by the sandbox's own tools, and outside of its
process namespace: nothing that runs there can see, signal or trace it. What it needs
is imported before it enters, and nothing afterwards: the files inside are the agent's.

There is no `os.setns` before Python 3.12, and modules such as `json` and `signal` take
longer to import than a command to run; hence ctypes, marshal and numbers.
"""

import ctypes
import errno
import os
import resource
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)

SIGKILL, SIGPIPE, SIGTERM, SIGXFSZ = 9, 13, 15, 25
SIG_DFL, SIG_IGN = 0, 1
# include/uapi/linux: sched.h, prctl.h, mount.h, keyctl.h, nsfs.h, seccomp.h
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PIDS, NEW_NETWORK, NEW_CGROUPS = 0x20000000, 0x40000000, 0x2000000
FILES = NEW_USER | NEW_MOUNTS
EVERYTHING = FILES | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK | NEW_CGROUPS
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND = 32, 4096
NS_GET_USERNS = 0xB701
KEYCTL_JOIN_SESSION_KEYRING = 1
RESOLVE_NO_MAGICLINKS = 2
CAPABILITY_VERSION = 0x20080522
# What a root without the host's powers needs to grade: chown, dac_override, fowner,
# kill, setgid, setuid.
ROOT_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7

# By machine: the audit number of the architecture, then the numbers of keyctl, and of
# what needs no capability, is of no use to a task and has broken kernels: add_key,
# request_key, keyctl, bpf, perf_event_open, userfaultfd, and the three of io_uring.
MACHINES = {
    "x86_64": (0xC000003E, 250, (248, 249, 250, 321, 298, 323, 425, 426, 427)),
    "aarch64": (0xC00000B7, 219, (217, 218, 219, 280, 241, 282, 425, 426, 427)),
}
PIDFD_SEND_SIGNAL, OPENAT2 = 424, 437  # the same number everywhere

# A command and all it starts carry a number as their limit of file locks, which Linux
# does not enforce. Without privilege it can be lowered and never raised, and later
# commands have lower ones: nothing passes itself off as older than it is.
MARK = 10  # RLIMIT_LOCKS, which Python does not name

STEADY_ROUNDS = 20  # of killing what is marked, before everything dies


class Problem(Exception):
    """What the files of the sandbox do not allow."""


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def enter(descriptor: int, namespaces: int) -> None:
    checked(libc.setns(descriptor, namespaces), "setns")


def become(uid: int | None) -> None:
    """Takes a user of the namespace just entered; None where there is but one."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def forget_imports() -> None:
    """From here on a module would be one of the sandbox's."""
    sys.path.clear()
    sys.meta_path.clear()


# One sandbox.


def start(request: dict) -> None:
    """Becomes the sandbox's monitor; a child prepares what bubblewrap cannot."""
    info, info_w = os.pipe()
    ready, ready_w = os.pipe()
    go, go_w = os.pipe()
    arguments, kept = [request["bwrap"], "--info-fd", str(info_w)], [info_w]
    if request["maps"]:
        arguments += ["--userns-block-fd", str(go)]
        kept.append(go)
    for path, text in request["files"].items():
        file = os.memfd_create("etc")
        os.write(file, text)
        os.lseek(file, 0, os.SEEK_SET)
        kept.append(file)
        arguments += ["--perms", "0644", "--file", str(file), path]
    # Its parent becomes bubblewrap, which knows nothing of it: it is nobody's child.
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            for descriptor in (info_w, ready_w, go, 0, 1):
                os.close(descriptor)
            main(lambda: prepare(request, info, ready, go_w))
        os._exit(0)
    os.waitpid(child, 0)
    for descriptor in (info, ready, go_w, int(sys.argv[2])):
        os.close(descriptor)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    os.dup2(ready_w, 1)
    os.close(ready_w)
    become(request["outer"])
    os.execve(request["bwrap"], [*arguments, *request["arguments"]], {})


def prepare(request: dict, info: int, ready: int, go: int) -> str:
    """Maps its users, forbids namespaces inside, and mounts its scratch."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        if not (more := os.read(info, 4096)):
            raise OSError(errno.ECHILD, "bubblewrap ended before its sandbox was there")
        text += more
    pid = int(text.partition(b'"child-pid":')[2].split(b",")[0].split(b"}")[0])
    if request["maps"]:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(request["maps"])
    os.close(go)
    if os.read(ready, 1) != b"\n":
        raise OSError(errno.ECHILD, "bubblewrap ended before its sandbox was ready")
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    enter(checked(libc.ioctl(mounts, NS_GET_USERNS), "NS_GET_USERNS"), NEW_USER)
    # This file is another one in every user namespace. Nothing inside can raise it.
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    with open("/proc/self/uid_map") as file:
        uid = int(file.read().split()[0])
    forget_imports()
    enter(mounts, NEW_MOUNTS)
    become(uid if request["maps"] else None)
    seal()
    scratch(request["scratch"], request["disk_bytes"])
    return str(pid)


def seal() -> None:
    """Makes the kernel's settings read-only, whoever the agent is to the host."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
    for name in ("sys", "sysrq-trigger", "irq", "bus", "fs"):
        if os.path.exists(path := f"/proc/{name}"):
            mount(path, path, None, MS_BIND, None)
            mount(path, path, None, MS_BIND | MS_REMOUNT | flags, None)


def scratch(folders: list[tuple[str, int, int]], size: int) -> None:
    """One limited file system under all folders that may be written, /tmp first.

    Each has its owner and its mode.
    """
    options = f"size={size},nr_inodes={max(1024, size >> 12)},mode=0755"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for number, (folder, owner, mode) in reversed(list(enumerate(folders))):
        source = f"/tmp/{number}"
        os.mkdir(source)
        os.chmod(source, mode)
        os.chown(source, owner, owner)
        mount(source, folder, None, MS_BIND, None)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None):
    names = [text and os.fsencode(text) for text in (source, target, kind)]
    done = libc.mount(*names, ctypes.c_ulong(flags), options and options.encode())
    checked(done, f"mount {target}")


# One command.


def run(request: dict) -> str:
    """Runs a command as the agent, or as the sandbox's root, and waits for it."""
    done, unread = request["done"], request["unread"]
    groups = [os.open(path, os.O_WRONLY) for path in request["cgroups"]]
    mark(request["mark"])
    forget_imports()
    enter(request["sandbox"], EVERYTHING)
    # Until the fork this process may be ended; from then on it waits for its child.
    libc.signal(SIGTERM, SIG_IGN)
    if (child := os.fork()) == 0:
        main(lambda: begin(request, groups))
    report("ok")  # its time begins
    silence = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)
    for descriptor in groups:
        os.close(descriptor)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    report(f"ok {status if status >= 0 else 128 - status}")
    os.close(int(sys.argv[2]))
    # Processes that live on keep a reader, or their next line would end them.
    os.read(done, 1)
    os.set_blocking(unread, True)
    while os.read(unread, 1 << 16):
        time.sleep(0.01)
    os._exit(0)


def mark(number: int) -> None:
    hard = resource.getrlimit(MARK)[1]
    top = hard if 0 <= hard < 1 << 62 else 1 << 62
    resource.setrlimit(MARK, (top - number, top - number))


def marked(number: int) -> int:
    """The limit that `mark` sets, as seen from a process that has none."""
    hard = resource.getrlimit(MARK)[1]
    return (hard if 0 <= hard < 1 << 62 else 1 << 62) - number


def begin(request: dict, groups: list[int]) -> None:
    """In the process namespace: gives everything up, then becomes the command."""
    for descriptor in groups:
        os.write(descriptor, b"0")
    last = int(sys.argv[2])
    os.set_inheritable(last, False)
    os.closerange(3, last)
    os.closerange(last + 1, (1 << 31) - 1)
    os.setsid()
    for number in (SIGTERM, SIGPIPE, SIGXFSZ):
        libc.signal(number, SIG_DFL)
    architecture, keyctl, denied = MACHINES[os.uname().machine]
    libc.syscall(keyctl, KEYCTL_JOIN_SESSION_KEYRING, None)
    for number, most in request["rlimits"]:
        hard = resource.getrlimit(number)[1]
        most = most if hard < 0 else min(most, hard)
        resource.setrlimit(number, (most, most))
    drop(request["uid"], ROOT_CAPABILITIES if request["uid"] == 0 else 0)
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    deny(architecture, denied)
    os.umask(0o022)
    try:
        os.chdir(request["cwd"])
    except (OSError, ValueError) as error:
        refuse(f"{request['cwd']}: {getattr(error, 'strerror', error)}", 126)
    execute(request["argv"], request["env"])


def execute(argv: list[str], env: dict[str, str]) -> None:
    """Becomes a program of the search path; a shell's words where it cannot."""
    name = argv[0]
    places = [""] if "/" in name else [f"{at}/" for at in env["PATH"].split(":")]
    number = errno.ENOENT
    for place in places:
        try:
            os.execve(place + name, argv, env)
        except (OSError, ValueError) as error:
            failed = getattr(error, "errno", errno.EINVAL)
            if failed not in (errno.ENOENT, errno.ENOTDIR):
                number = failed
    refuse(f"{name}: {os.strerror(number)}", 127 if number == errno.ENOENT else 126)


def refuse(line: str, status: int) -> None:
    os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))
    os._exit(status)


def drop(uid: int | None, kept: int) -> None:
    """Takes a user and loses all capabilities but some, for good."""
    for capability in range(64):
        if not kept >> capability & 1:
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails past the last
    become(uid)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    checked(libc.capset(header, sets), "capset")


def deny(architecture: int, numbers: tuple[int, ...]) -> None:
    """A seccomp filter: these calls, and those of other architectures, fail."""
    nosys, perm = 0x50000 | errno.ENOSYS, 0x50000 | errno.EPERM
    load, equal, above, answer = 0x20, 0x15, 0x35, 0x06
    steps = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        (answer, 0, 0, nosys),
        (load, 0, 0, 0),  # the number
        (above, 0, 1, 0x40000000),  # those of x32
        (answer, 0, 0, nosys),
    ]
    for number in numbers:
        steps += [(equal, 0, 1, number), (answer, 0, 0, perm)]
    steps.append((answer, 0, 0, 0x7FFF0000))

    class Step(ctypes.Structure):
        _fields_ = (
            *(("code", ctypes.c_uint16), ("jt", ctypes.c_uint8)),
            *(("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)),
        )

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Step)))

    program = Program(len(steps), (Step * len(steps))(*steps))
    done = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    checked(done, "seccomp")


# The end of commands.


def kill(request: dict) -> str:
    """Kills what one command started, or everything; returns when it is dead.

    Signals are sent from outside of the process namespace, where the sender cannot be
    killed, and to everything at once from inside, where nothing can fork away.
    """
    most = None if request["mark"] is None else marked(request["mark"])
    deadline = time.monotonic() + request["secs"]
    forget_imports()
    enter(request["sandbox"], FILES | NEW_PIDS)
    become(0 if request["uid"] is not None else None)
    rounds = 0
    while True:
        if most is None or rounds > STEADY_ROUNDS:
            if (child := os.fork()) == 0:
                libc.kill(-1, SIGKILL)
                os._exit(0)
            os.waitpid(child, 0)
        if not (found := living(most)):
            return ""
        for descriptor in found:
            libc.syscall(PIDFD_SEND_SIGNAL, descriptor, SIGKILL, None, 0)
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise OSError(errno.EBUSY, f"{len(found)} processes do not die")
        rounds += 1
        time.sleep(min(rounds, 50) / 1000)


def living(most: int | None) -> list[int]:
    """Descriptors of the agent's processes, of those with a mark of at most so much."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            folder = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        if alive(folder) and (most is None or limit(folder) <= most):
            found.append(folder)
        else:
            os.close(folder)
    return found


def alive(folder: int) -> bool:
    # The state follows the name, which is the process's own choice.
    return content(folder, "stat").rpartition(b") ")[2][:1] not in (b"", b"Z", b"X")


def limit(folder: int) -> float:
    line = content(folder, "limits").partition(b"Max file locks")[2].split(b"\n")[0]
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else float("inf")


def content(folder: int, name: str) -> bytes:
    try:
        file = os.open(name, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(file)


# Files.


def visit(request: dict) -> None:
    """Enters where the sandbox's files are, and nothing else of it."""
    forget_imports()
    os.umask(0o022)
    enter(request["sandbox"], FILES)
    become(0 if request["uid"] is not None else None)


def opened(path: str, flags: int) -> int:
    """A regular file: never a pipe or a device, never by a link of /proc."""
    how = (ctypes.c_uint64 * 3)(
        flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC,
        0o644 if flags & os.O_CREAT else 0,
        RESOLVE_NO_MAGICLINKS,
    )
    name = os.fsencode(path)
    file = checked(
        libc.syscall(OPENAT2, -100, name, ctypes.byref(how), ctypes.sizeof(how)), path
    )
    if os.fstat(file).st_mode & 0o170000 != 0o100000:
        raise Problem(f"{path}: not a file")
    return file


def read(request: dict) -> str:
    file = opened(request["path"], os.O_RDONLY)
    left = request["most_bytes"]
    while chunk := os.read(file, min(left + 1, 1 << 20)):
        left -= len(chunk)
        if left < 0:
            raise Problem(f"{request['path']}: more than {request['most_bytes']} bytes")
        os.write(1, chunk)
    return ""


def write(request: dict) -> str:
    path, owner = request["path"], request["uid"]
    folder, missing = os.path.dirname(path), []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        os.mkdir(folder)
        if owner is not None:
            os.chown(folder, owner, owner)
    file = opened(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(file, 0)
    while chunk := os.read(0, 1 << 20):
        while chunk:
            chunk = chunk[os.write(file, chunk) :]
    if owner is not None:
        os.chown(file, owner, owner)
    os.chmod(file, request["mode"])
    return ""


def pack(request: dict) -> str:
    import archive  # already loaded, before anything was entered

    limits = request["most_bytes"], request["most_files"]
    try:
        with open(1, "wb", closefd=False) as stream:
            archive.pack(request["path"], stream, *limits)
    except BrokenPipeError:
        pass  # whoever reads knows why no more is wanted
    except archive.Refused as error:
        raise Problem(f"{request['path']}: {error}") from error
    return ""


def unpack(request: dict) -> str:
    import archive

    try:
        with open(0, "rb", closefd=False) as stream:
            archive.unpack(
                *(stream, request["path"], sys.maxsize, sys.maxsize),
                links="any",
                owner=request["uid"],
            )
    except archive.Refused as error:
        raise Problem(f"{request['path']}: {error}") from error
    return ""


FILE_OPERATIONS = {"read": read, "write": write, "pack": pack, "unpack": unpack}


def operate(request: dict) -> str:
    if request["do"] in ("pack", "unpack"):
        sys.path.insert(0, request["modules"])
        import archive  # noqa: F401
    visit(request)
    try:
        return FILE_OPERATIONS[request["do"]](request)
    except OSError as error:
        raise Problem(f"{request['path']}: {error.strerror}") from error


def report(line: str) -> None:
    text = " ".join(line.split()).encode("utf-8", "backslashreplace")
    os.write(int(sys.argv[2]), text[:4000] + b"\n")


def main(function) -> None:
    """Reports what a function says, or how it failed, and ends the process."""
    try:
        report(f"ok {function()}")
    except Problem as error:
        report(f"no {error}")
    except BaseException as error:
        report(f"failed {error or type(error).__name__}")
    os._exit(0)


def answer(request: dict) -> None:
    """Does what is asked, and ends the process."""
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    do = {"start": start, "run": run, "kill": kill}.get(request["do"], operate)
    main(lambda: do(request))
