"""Triton's interpreter truncates where a GPU rounds, and multiplies the bits of bfloat16; here it
does as a GPU does."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def rounding_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert floats as torch does, to nearest even, and multiply matrices in
    float32."""
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    torch_types = {
        language.float32: torch.float32,
        language.bfloat16: torch.bfloat16,
        language.float16: torch.float16,
        language.float8e4nv: torch.float8_e4m3fn,
    }
    integers = {
        1: (torch.uint8, np.uint8),
        2: (torch.int16, np.uint16),
        4: (torch.int32, np.uint32),
    }

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        bits = torch.from_numpy(np.ascontiguousarray(numbers).view(np.uint8))
        values = bits.view(torch_types[source]).reshape(numbers.shape)
        as_integer, as_numpy = integers[torch_types[target].itemsize]
        return values.to(torch_types[target]).view(as_integer).numpy().view(as_numpy)

    def as_float32(operand: Any) -> Any:
        source = operand.dtype.scalar
        bits = operand.data if source == language.float32 else None
        if bits is None and source == language.float16:
            bits = operand.data.astype(np.float32)
        elif bits is None:
            bits = convert(operand.data, source, language.float32, None).view(np.float32)
        return interpreter.TensorHandle(bits, language.float32)

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(builder, as_float32(a), as_float32(b), *others)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
