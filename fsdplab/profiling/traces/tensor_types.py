"""Tensors as a trace describes them, by their dimensions and their type as text: their bytes and number formats."""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from typing import Any

_MOST_BYTES = 2**50
# bytes of an element -> names of its type, in C++ and in Python; "long int" and "short int" are GCC's
_NAMES_BY_BYTES = {
    1: ("signed char", "unsigned char", "char", "byte", "bool", "int8", "uint8"),
    2: (
        "bfloat16",
        "c10::bfloat16",
        "half",
        "c10::half",
        "float16",
        "short",
        "short int",
        "unsigned short",
        "int16",
        "uint16",
    ),
    4: ("float", "float32", "int", "int32", "uint32", "unsigned int", "complexhalf", "c10::complex<c10::half>"),
    8: (
        "double",
        "float64",
        "long",
        "long int",
        "long long",
        "unsigned long",
        "int64",
        "uint64",
        "complexfloat",
        "c10::complex<float>",
    ),
    16: ("complexdouble", "c10::complex<double>"),
}
_ITEM_BYTES = {name: nbytes for nbytes, names in _NAMES_BY_BYTES.items() for name in names}
_FORMATS = {
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
    "float64": "fp64",
    "bfloat16": "bf16",
    "c10::bfloat16": "bf16",
    "half": "fp16",
    "c10::half": "fp16",
    "float16": "fp16",
}
_EIGHT_BITS = re.compile(r"^(c10::)?float8_e\w+$")


def tensor_bytes(dims: Any, kind: Any) -> int:
    """Bytes of a tensor of a trace's `Input Dims` and `Input type`; 0 for what is no tensor, or larger than a petabyte.

    >>> tensor_bytes([4, 8], "float"), tensor_bytes([], "Scalar")
    (128, 0)
    """
    if not isinstance(dims, list) or not dims:
        return 0
    # a list of tensors has lists as its lengths
    if not all(type(length) is int and length >= 0 for length in dims):
        return 0
    nbytes = math.prod(dims) * _item_bytes(str(kind).lower())
    return nbytes if nbytes <= _MOST_BYTES else 0


def _item_bytes(kind: str) -> int:
    return 1 if _EIGHT_BITS.match(kind) else _ITEM_BYTES.get(kind, 0)


@lru_cache(maxsize=4096)
def number_format(shapes: str) -> str:
    """The number format of the first matrix that an operator was given, as JSON of `Events.shapes`; "" for none.

    >>> number_format('[[[2], [4, 8], [8, 2]], ["c10::BFloat16", "c10::BFloat16", "c10::BFloat16"]]')
    'bf16'
    """
    if not shapes:
        return ""
    dims, types, *_ = json.loads(shapes)
    for dim, kind in zip(dims or (), types or ()):
        # vectors are biases and scales, which may have another type than the product
        if isinstance(dim, list) and len(dim) > 1:
            name = str(kind).lower()
            return "fp8" if _EIGHT_BITS.match(name) else _FORMATS.get(name, "")
    return ""
