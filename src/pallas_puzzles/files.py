"""Files that several programs share: a lock that is let go when its holder dies, and writing all or nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import filelock

LOCK_TIMEOUT_S = 5.0


def locked(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> filelock.BaseFileLock:
    """Holds the lock file `path`, which it makes. Raises TimeoutError while another program does, else OSError."""
    return filelock.FileLock(path, timeout=timeout_s, poll_interval=0.005)


def signature_of(path: Path) -> tuple[int, int]:
    """How a file looks from outside: when it was written, and its size."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


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
