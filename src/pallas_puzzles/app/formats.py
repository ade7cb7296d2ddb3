"""jupytext and nbformat, imported without what only a server needs: in a fifth of the time.

jupytext imports Jupyter's server where there is one. nbformat imports jsonschema, which prepares to check addresses and
durations where it can: that takes a second, and notebooks hold neither.
"""

import sys

NOT_NEEDED = {"tornado", "rfc3987_syntax", "isoduration"}

_hidden = NOT_NEEDED - sys.modules.keys()  # what somebody has imported already costs nothing
sys.modules.update(dict.fromkeys(_hidden))  # type: ignore[arg-type]  # as if they were not installed
try:
    import jupytext
    import nbformat
    from jupytext.combine import combine_inputs_with_outputs
    from nbformat import NotebookNode
finally:
    for _each in _hidden:
        del sys.modules[_each]

__all__ = ["NotebookNode", "combine_inputs_with_outputs", "jupytext", "nbformat"]
