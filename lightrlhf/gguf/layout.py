"""The layout of a GGUF file: the sizes and offsets of its header must match its bytes.

Tensors lie in the order of the header, each at the next multiple of the alignment, and nothing follows the last one.
llama.cpp reads no other layout, so a wrong size, type or offset shows as a tensor at the wrong place.

Left out: wrong types with the same number of bits per value, unless `general.file_type` names a type that no writer
mixes with them; wrong values, since a file has no checksum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PURE = ("F32", "F16", "BF16", "Q4_0")  # types whose files contain no other type of the same size


def read_header(file: Path) -> Any:
    """The reader of a file, with its metadata and tensors. Raises: ValueError, or any error of a damaged header."""
    from gguf import GGUFReader, GGUFValueType

    class Bounded(GGUFReader):
        """Raises: ValueError before memory is allocated, if more is to be read than the file has."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends where more was to come")
            return super()._get(offset, dtype, count, *more, **options)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            start, number = orig_offs + 12, self.gguf_scalar_to_np.get(GGUFValueType(kind[0]))
            least = 8 if number is None else np.dtype(number).itemsize  # of a text the bytes of its length
            if int(count[0]) * least > len(self.data) - start:
                raise ValueError(f"it has an array of {count[0]} entries, for which it is too short")
            if number is None or not count[0]:
                return super()._get_field_parts(orig_offs, raw_type)
            values = self._get(start, number, count[0])  # at once, not one by one
            types = [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
            return start - orig_offs + values.nbytes, [kind, count, values], [2], types

        def _get_tensor_info_field(self, orig_offs: int) -> Any:
            found = super()._get_tensor_info_field(orig_offs)
            if not found.name:  # a stretch of zeros reads as any number of tensors
                raise ValueError("it has a tensor without a name")
            return found

    return Bounded(file)


def check_layout(reader: Any) -> None:
    """Raises: ValueError naming the first tensor at a wrong place, or bytes after the last one."""
    alignment, place = int(reader.alignment), int(reader.data_offset)
    for tensor in reader.tensors:
        if math.prod(map(int, tensor.shape)) != tensor.n_elements:
            raise ValueError(f"{tensor.name!r} has {' x '.join(map(str, tensor.shape))} numbers")
        if tensor.data_offset != place:
            raise ValueError(
                f"{tensor.name!r} begins at byte {tensor.data_offset}, and by the sizes of those before it at {place}"
            )
        place += math.ceil(tensor.n_bytes / alignment) * alignment
    if len(reader.data) > place:
        raise ValueError(f"its last tensor ends before byte {place}, the file at {len(reader.data)}")


def check_kinds(reader: Any, stored: Mapping[str, Any]) -> None:
    """Raises: ValueError naming a tensor whose type contradicts `general.file_type` but has the same size."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

    number: Any = stored.get("general.file_type")
    try:
        name = LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:  # missing, or by a newer writer
        return
    if name not in PURE:
        return
    said = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[said]
    for tensor in reader.tensors:
        own_block, own_size = GGML_QUANT_SIZES[tensor.tensor_type]
        if tensor.tensor_type != said and own_size * block == size * own_block:
            raise ValueError(f"{tensor.name!r} is stored as {tensor.tensor_type.name}, its general.file_type is {name}")
