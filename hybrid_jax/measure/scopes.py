"""Which part of the model an HLO instruction belongs to, by the named scopes it was traced in."""

import re
from collections.abc import Collection
from typing import NamedTuple

PARTS = ("mixer", "ffn")  # scopes inside of a layer, besides those of ops
OUTSIDE = ("embed", "rope", "head", "sample", "prompt_logprobs", "owners")  # of the step
NORMS = "norms"  # what else a layer does
REST = "rest of the step"
UNATTRIBUTED = "unattributed"
OTHER_MODULES = "other programs"

_LAYER = re.compile(r"layer_(\d+)_(\w+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")


class Place(NamedTuple):
    """A part of the model. `kind` is the layer's, or a name of its own outside of the layers."""

    layer: int | None
    kind: str
    op: str


def place_of(op_name: str, ops: Collection[str]) -> Place:
    """The place of a name stack like "jit(step)/layer_0_linear/mixer/gated_delta_rule/mul".

    `ops` are scopes of ops; in a layer the outermost of them counts, or else its innermost part.
    """
    scopes = op_name.split("/")
    for i, scope in enumerate(scopes):
        if found := _LAYER.fullmatch(scope):
            parts = [s for s in scopes[i:] if s in PARTS]
            called = [s for s in scopes[i:] if s in ops]
            return Place(int(found[1]), found[2], (called[:1] + parts[::-1] + [NORMS])[0])
        if scope in OUTSIDE:
            return Place(None, scope, scope)
    kind = REST if op_name else UNATTRIBUTED
    return Place(None, kind, kind)


def op_names(hlo: str) -> dict[str, str]:
    """The name stack of every instruction of a compiled module's text, "" if it has none.

    A fusion has that of its root, and so has a call that has none of its own: what is fused across
    scopes counts for the last of them.
    """
    names: dict[str, str] = {}
    roots: dict[str, str] = {}  # computation -> its root instruction
    called: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            computation = opened[1]
        elif found := _INSTRUCTION.match(line):
            name = found[2]
            stack, callee = _OP_NAME.search(line), _CALLED.search(line)
            names[name] = stack[1] if stack else ""
            if found[1]:
                roots[computation] = name
            if callee:
                called[name] = callee[1]
    return {name: stack or _of_root(name, names, roots, called) for name, stack in names.items()}


def _of_root(
    name: str, names: dict[str, str], roots: dict[str, str], called: dict[str, str]
) -> str:
    while name in called and not names[name]:
        name = roots[called[name]]
    return names[name]
