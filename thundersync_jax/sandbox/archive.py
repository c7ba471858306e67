"""Folders as tar streams, packed and unpacked without following a link.

Whoever unpacks trusts nothing of the stream: neither names nor links leave the folder,
nothing but folders, regular files and symbolic links is made, and sizes are counted as
they arrive. Imports the standard library only: `join` loads it beside itself.
"""

import os
import stat
import tarfile

# Names of owners would be looked up through libraries of whatever root this runs in.
tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]

_CHUNK_BYTES = 1 << 20
_MOST_FOLDERS = 128  # in each other: what is deeper, shutil.rmtree cannot remove
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """A stream that is larger than it may be, or that cannot be a folder."""


class Budget:
    """How many bytes and entries may still come."""

    def __init__(self, most_bytes: int, most_files: int):
        self.limits = (most_bytes, most_files)
        self.bytes = self.files = 0

    def take(self, size: int) -> None:
        """Raises Refused where one more entry of `size` bytes is too much."""
        self.bytes, self.files = self.bytes + size, self.files + 1
        if self.bytes > self.limits[0]:
            raise Refused(f"more than {self.limits[0]} bytes")
        if self.files > self.limits[1]:
            raise Refused(f"more than {self.limits[1]} files")


def pack(path: str | os.PathLike, stream, most_bytes: int, most_files: int) -> None:
    """Writes a folder's content, or one file under its name, to a binary stream.

    Raises Refused beyond the limits, OSError where something cannot be read.
    """
    budget = Budget(most_bytes, most_files)

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym()):
            return None
        budget.take(member.size)
        return member

    name = "." if os.path.isdir(path) else os.path.basename(path)
    # A link that was named is what it leads to; those inside stay links.
    path = os.path.realpath(path)
    with tarfile.open(
        fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=_CHUNK_BYTES
    ) as tar:
        tar.inodes = _NoHardLinks()
        try:
            tar.add(path, name, filter=kept)
        except RecursionError as error:
            raise Refused("folders in folders too deep") from error


def unpack(
    stream,
    folder: str | os.PathLike,
    most_bytes: int,
    most_files: int,
    *,
    links: str = "inside",
    owner: int | None = None,
) -> tuple[int, list[str]]:
    """Reads a tar stream into a folder, which is made where it is missing.

    Args:
      stream: A binary stream, read once and in order.
      folder: Where it goes; what is there under the same name is replaced.
      most_bytes: Of all files together.
      most_files: Entries of any kind.
      links: "inside" keeps symbolic links that cannot leave the folder, "any" all.
      owner: Uid and gid of what is made, None for the caller's own.

    Returns:
      How many entries there were, and the names of those that were left out: devices,
      pipes, links out of the folder.

    Raises:
      Refused: Names out of the folder, or more than the limits.
    """
    budget, left_out, later = Budget(most_bytes, most_files), [], []
    os.makedirs(folder, exist_ok=True)
    # The folder itself may be reached by a link: whoever named it meant it.
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with tarfile.open(
            fileobj=stream, mode="r|", bufsize=_CHUNK_BYTES, tarinfo=_Member
        ) as tar:
            for member in tar:
                budget.take(member.size)
                parts = _parts(member.name)
                if member.issym():
                    kept = links == "any" or _stays(parts, member.linkname)
                    (later if kept else left_out).append(
                        (parts, member.linkname) if kept else member.name
                    )
                elif member.isdir() or member.isreg():
                    _make(top, tar, member, parts, owner)
                elif member.islnk():
                    raise Refused(f"{member.name!r} is a hard link")
                else:
                    left_out.append(member.name)
        # Links last: nothing of the stream can be written through one.
        for parts, target in later:
            _link(top, parts, target, owner)
    except tarfile.TarError as error:
        raise Refused(f"no whole tar stream: {error}") from error
    finally:
        os.close(top)
    return budget.files, left_out


class _Member(tarfile.TarInfo):
    """A header; those that hold long names are read whole, so their size is bounded."""

    def _proc_member(self, tar):
        if self.type in _HEADERS and self.size > _CHUNK_BYTES:
            raise Refused(f"a header of {self.size} bytes")
        return super()._proc_member(tar)


class _NoHardLinks(dict):
    """What tarfile remembers of files it has seen, forgotten: each is sent whole."""

    def __setitem__(self, key, value):
        pass


def _parts(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused(f"the name {name!r} leaves the folder")
    if len(parts) > _MOST_FOLDERS:
        raise Refused(f"{len(parts)} folders in each other")
    return parts


def _stays(parts: tuple[str, ...], target: str) -> bool:
    """Whether a link cannot leave, whatever its target's own parts turn out to be.

    `..` only in front, where it climbs folders that are no links themselves.
    """
    steps = [step for step in target.split("/") if step not in ("", ".")]
    climbs = next((i for i, step in enumerate(steps) if step != ".."), len(steps))
    return (not target.startswith("/") and ".." not in steps[climbs:]) and climbs < max(
        len(parts), 1
    )


def _parent(top: int, parts: tuple[str, ...], owner: int | None) -> int:
    """A descriptor of the last part's folder, made where it is missing."""
    at = os.dup(top)
    for part in parts[:-1]:
        _folder(at, part, owner)
        below = os.open(part, _FOLDER, dir_fd=at)
        os.close(at)
        at = below
    return at


def _folder(at: int, name: str, owner: int | None) -> None:
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=at).st_mode):
            return
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        pass
    os.mkdir(name, 0o755, dir_fd=at)
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=at, follow_symlinks=False)


def _vacate(at: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        pass
    except IsADirectoryError as error:
        raise Refused(f"{name!r} is a folder already") from error


def _make(top: int, tar, member: tarfile.TarInfo, parts, owner: int | None) -> None:
    if not parts:
        return  # the folder itself keeps its mode
    at = _parent(top, parts, owner)
    try:
        if member.isdir():
            _folder(at, parts[-1], owner)
            file = os.open(parts[-1], _FOLDER, dir_fd=at)
        else:
            _vacate(at, parts[-1])
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(parts[-1], flags, 0o600, dir_fd=at)
    finally:
        os.close(at)
    try:
        if member.isreg():
            source = tar.extractfile(member)
            while chunk := source.read(_CHUNK_BYTES):
                _write(file, chunk)
        if owner is not None:
            os.chown(file, owner, owner)
        # Never set-user-ID; folders stay open to whoever unpacks into them.
        os.chmod(file, (member.mode & 0o777) | (0o700 if member.isdir() else 0))
    finally:
        os.close(file)


def _link(top: int, parts: tuple[str, ...], target: str, owner: int | None) -> None:
    if not parts:
        raise Refused("the folder itself is a link")
    at = _parent(top, parts, owner)
    try:
        _vacate(at, parts[-1])
        os.symlink(target, parts[-1], dir_fd=at)
        if owner is not None:
            os.chown(parts[-1], owner, owner, dir_fd=at, follow_symlinks=False)
    finally:
        os.close(at)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
