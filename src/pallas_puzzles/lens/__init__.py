"""What a kernel does: captured, run step by step, explained, drawn."""

from .capture import Call, Operand, SourceLine
from .machine import Figures, Run, Trace, figures, trace
from .ops import Beyond

__all__ = ["Beyond", "Call", "Figures", "Operand", "Run", "SourceLine", "Trace", "figures", "trace"]
