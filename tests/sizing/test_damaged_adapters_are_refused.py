"""Adapters whose files or config no writer makes are refused by the name of what is wrong."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from adapter_files import PEFT, put, whole_adapter, write
from lora_mem.errors import SizingError
from lora_mem.sizing.adapters import read_adapter


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SizingError, match=r"adapter_model\.safetensors.*is missing"):
        read_adapter(tmp_path)
    write(tmp_path, whole_adapter())
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    for damaged in (b"", b"1234", whole[:40], struct.pack("<Q", 1 << 60) + whole[8:], whole[: 7 + length]):
        weights.write_bytes(damaged)
        with pytest.raises(SizingError, match="is not a safetensors file"):
            read_adapter(tmp_path)
    weights.write_bytes(whole.replace(b'"shape": [4, 32]', b'"shape": [4, 33]'))
    with pytest.raises(SizingError, match="is damaged"):
        read_adapter(tmp_path)
    for lying in (whole[:-1], whole + b"1", whole[: 8 + length], struct.pack("<Q", length + 8) + whole[8:-8]):
        weights.write_bytes(lying.replace(b"}}" + b"\0" * 8, b"}}" + b" " * 8))
        with pytest.raises(SizingError, match="is damaged: its header says"):
            read_adapter(tmp_path)
    weights.write_bytes(whole)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(SizingError, match=r"adapter_config\.json.*is missing"):
        read_adapter(tmp_path)
    write(tmp_path, whole_adapter(), {"r": 4})
    with pytest.raises(SizingError, match="lora_alpha"):
        read_adapter(tmp_path)
    with pytest.raises(SizingError, match="config=None"):
        read_adapter({})


ENTRY = {"dtype": "BF16", "shape": [4, 32], "data_offsets": [0, 256]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "must hold a JSON object"),
        ({"a": 5}, "a=5: must be an object with dtype, shape and data_offsets"),
        ({"a": {"dtype": "BF16", "data_offsets": [0, 2]}}, "shape of a=None: must be a list of whole numbers"),
        ({"a": {**ENTRY, "shape": "ab"}}, "shape of a='ab': must be a list"),
        ({"a": {**ENTRY, "shape": [4, -32]}}, r"shape of a=\[4, -32\]: must be"),
        ({"a": {**ENTRY, "shape": [4, 32.0]}}, "shape of a="),
        ({"a": {**ENTRY, "data_offsets": [0, 1, 256]}}, r"data_offsets of a=\[0, 1, 256\]: must be two"),
        ({"a": {**ENTRY, "data_offsets": None}}, "data_offsets of a=None"),
        ({"a": {**ENTRY, "data_offsets": [256, 0]}}, "is damaged: a has -256 bytes"),
        ({"a": {**ENTRY, "data_offsets": [8, 264]}}, "is damaged: a begins at byte 8 of the data, not 0"),
        ({"a": ENTRY, "b": ENTRY}, "is damaged: b begins at byte 0 of the data, not 256"),
        ({"a": {**ENTRY, "dtype": "BF17"}}, "dtype of a='BF17': must be one of"),
        ({"a": {**ENTRY, "dtype": ["BF16"]}}, "dtype of a="),
    ],
)
def test_a_header_that_no_writer_makes(header: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, {})
    put(tmp_path, json.dumps(header).encode(), 256)
    with pytest.raises(SizingError, match=message):
        read_adapter(tmp_path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe\x00", b'{"a": ', b"[1]", b"9" * 5000])
def test_text_that_holds_no_object(text: bytes, tmp_path: Path) -> None:
    write(tmp_path, {})
    put(tmp_path, text, 0)
    with pytest.raises(SizingError, match=r"adapter_model\.safetensors \(header\)"):
        read_adapter(tmp_path)
    write(tmp_path, {})
    (tmp_path / "adapter_config.json").write_bytes(text)
    with pytest.raises(SizingError, match=r"adapter_config\.json"):
        read_adapter(tmp_path)


def test_a_source_that_is_none(tmp_path: Path) -> None:
    for source in (None, 5, [tmp_path]):
        with pytest.raises(SizingError, match="must be the directory of an adapter, or a dict"):
            read_adapter(source)  # type: ignore[arg-type]
    with pytest.raises(SizingError, match="is not a path"):
        read_adapter("a" * 5000)
    with pytest.raises(SizingError, match="config='x': must be PEFT's config"):
        read_adapter({}, "x")  # type: ignore[arg-type]
    with pytest.raises(SizingError, match="tensor a=5: must have shape"):
        read_adapter({"a": 5}, PEFT)
