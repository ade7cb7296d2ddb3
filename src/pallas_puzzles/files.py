"""Files that several programs share: a lock that is let go when its holder dies, and writing all or nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_TIMEOUT_S = 5.0


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Holds the lock file `path`, which it makes. Raises TimeoutError while another program does, else OSError."""
    with open(path, "a+b") as stream:
        deadline = time.monotonic() + timeout_s
        while not try_lock(stream.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is held by another program")
            time.sleep(0.005)
        try:
            yield
        finally:
            try_lock(stream.fileno(), release=True)


def write_whole(path: Path, content: bytes) -> None:
    """At any moment the file is the old one or the new one, whole. Raises OSError, and then nothing has changed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            with contextlib.suppress(OSError):
                temporary.chmod(path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def try_lock(handle: int, *, release: bool = False) -> bool:
    """Takes the lock, or lets it go. False while another program has it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, 0, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_UNLCK if release else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN if release else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks: there, one writer at a time is all we can serve
    return True
