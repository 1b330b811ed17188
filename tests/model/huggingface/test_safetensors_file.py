"""Files that are written in pieces are read by the library."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from phalanx.model.huggingface.safetensors_file import FileTensor, write_safetensors


def test_library_reads_tensors_that_were_written_in_pieces(tmp_path):
    tensors = {
        "odd": torch.arange(7.0).to(torch.bfloat16),
        "matrix": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)),
        "é": torch.randn(2, 4, 3, dtype=torch.float64).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
    }
    entries = {
        "odd": FileTensor(torch.bfloat16, torch.Size([7]), lambda: [tensors["odd"].double()[:3], tensors["odd"][3:]]),
        "matrix": FileTensor(torch.float32, torch.Size([5, 3]), lambda: tensors["matrix"].split(2)),
        "é": FileTensor(torch.bfloat16, torch.Size([2, 4, 3]), lambda: tensors["é"].mT.contiguous().mT),
        "empty": FileTensor(torch.float32, torch.Size([0, 4]), list),
        "scalar": FileTensor(torch.float32, torch.Size([]), lambda: [tensors["scalar"]]),
    }
    write_safetensors(tmp_path / "x.safetensors", entries)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    content = (tmp_path / "x.safetensors").read_bytes()
    header_size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:][:header_size])
    begins = {name: 8 + header_size + header[name]["data_offsets"][0] for name in tensors}
    assert all(begin % tensors[name].itemsize == 0 for name, begin in begins.items())


def test_pieces_must_be_all_of_a_tensor(tmp_path):
    entry = FileTensor(torch.float32, torch.Size([4]), lambda: [torch.zeros(3)])
    with pytest.raises(AssertionError, match="short"):
        write_safetensors(tmp_path / "x.safetensors", {"short": entry})
