"""jupytext and nbformat, imported without what only a server needs: in a fifth of the time.

jupytext imports Jupyter's server where there is one. nbformat imports jsonschema, which prepares to check addresses and
durations where it can: that takes a second, and notebooks hold neither.
"""

import contextlib
import sys
from collections.abc import Iterator

NOT_NEEDED = {"tornado", "rfc3987_syntax", "isoduration"}


@contextlib.contextmanager
def _without(names: set[str]) -> Iterator[None]:
    """While these modules seem not to be installed, unless somebody has imported them already."""
    hidden = names - sys.modules.keys()
    for each in hidden:
        sys.modules[each] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for each in hidden:
            del sys.modules[each]


with _without(NOT_NEEDED):
    import jupytext
    import nbformat
    from jupytext.combine import combine_inputs_with_outputs
    from nbformat import NotebookNode

__all__ = ["NotebookNode", "combine_inputs_with_outputs", "jupytext", "nbformat"]
