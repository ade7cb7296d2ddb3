"""Whose code is it: the reader's, a library's, or ours?"""

import os
import sysconfig
from collections.abc import Callable
from types import CodeType
from typing import Any

from ..installation import PACKAGE

COURSE_DIR = os.path.join(PACKAGE, "_course") + os.sep  # in a wheel: the notebooks, which stand for the reader's code
_LIBRARY_DIRS = tuple(
    form(path) + os.sep
    for path in [str(PACKAGE), *(p for key, p in sysconfig.get_paths().items() if "lib" in key)]
    for form in (os.path.abspath, os.path.realpath)
)


def for_the_reader[T](call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """call(*args, **kwargs), where `call` runs the reader's code: what JAX, NumPy or Python object to in there, a wrong
    number of arguments too, is about that code."""
    return call(*args, **kwargs)


def is_library_file(file: str) -> bool:
    """True for the standard library, installed packages, this package, and code that has no file. Touches no disk."""
    if file.startswith("<"):
        return not file.startswith(("<ipython-input", "<overlay>"))  # a cell; code that session.run lays over the holes
    return file.startswith(_LIBRARY_DIRS) or "site-packages" in file or "dist-packages" in file


def is_readers_code(code: CodeType) -> bool:
    """Whether code stands in a file of the reader's, and not in a library or here."""
    return code.co_filename.startswith(COURSE_DIR) or not is_library_file(code.co_filename)
