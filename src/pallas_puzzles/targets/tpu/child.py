"""The process that holds libtpu: reads requests on stdin, compiles, answers on a pipe. Imports nothing of ours.

libtpu may abort the process that it lives in, talks on stderr, and takes its flags from the environment once, when it
is loaded. So it lives here, started by compiler.py with the right environment, and never in the reader's process.

A request is one line of JSON, {"blob": file, "topology": name, "mesh": [names, sizes], "options": {...}}; so is the
answer, {"kernels": [...], ...} or {"error": text}. "whole": true asks for the program's own text, too.
"""

import json
import os
import re
import sys
from typing import Any


def main(answers_fd: int) -> None:
    answers = os.fdopen(answers_fd, "w")
    import jax  # noqa: F401 - the slow part of the first request, done before it comes

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = _compile(**json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _compile(
    blob: str, topology: str, mesh: tuple[list[str], list[int]], options: dict[str, str], whole: bool = False
) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    with open(blob, "rb") as file:
        exported = export.deserialize(bytearray(file.read()))
    names, sizes = mesh
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    tpus = Mesh(np.array(devices[: exported.nr_devices]).reshape(sizes), names)
    replicated = NamedSharding(tpus, PartitionSpec())
    if exported.nr_devices == 1:
        shardings: list[Any] = [replicated] * len(exported.in_avals)
        out: Any = replicated
    else:
        shardings = [s or replicated for s in exported.in_shardings_jax(tpus)]
        out = [s or replicated for s in exported.out_shardings_jax(tpus)]
    args = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    traced = jax.jit(lambda *flat: jax.tree.leaves(_call(exported, flat)), out_shardings=out).trace(*args)
    compiled = traced.lower().compile(compiler_options=options)
    text = compiled.as_text() or ""
    answer = {"kernels": list(_kernels(text)), "copies": len(re.findall(r" copy(?:-start)?\(", text))}
    if whole:
        memory = compiled.memory_analysis()
        answer |= {"text": text, "temporary_bytes": memory.temp_size_in_bytes if memory else None}
    return answer


def _call(exported: Any, flat: tuple[Any, ...]) -> Any:
    import jax

    args, kwargs = jax.tree.unflatten(exported.in_tree, flat)
    return exported.call(*args, **kwargs)


def _kernels(hlo: str) -> Any:
    """Name, results and operands, as '[f32[8,128]]', of every kernel in an HLO program, in its order."""
    for match in re.finditer(
        r"%(\S+) = (.*?) custom-call\(.*?custom_call_target=\"tpu_custom_call\""
        r"(?:.*?operand_layout_constraints=\{(.*?\})\})?",
        hlo,
    ):
        shapes = [re.findall(r"\b([a-z]\w*\[[\d,]*\])", part or "") for part in (match[2], match[3])]
        yield {"name": match[1], "results": shapes[0], "operands": shapes[1]}


if __name__ == "__main__":
    main(int(sys.argv[1]))
