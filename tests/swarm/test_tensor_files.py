"""Files of tensors, by piece: they read what safetensors writes, and safetensors reads them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.swarm.pieces import ModelPiece
from phalanx.swarm.tensor_files import TensorFile, TensorFileError

STACK = "blocks.0.mlp.experts.up"


def test_tensor_file_written_by_piece_is_readable_by_safetensors(tmp_path):
    path, vector = tmp_path / "x.safetensors", torch.arange(5.0)
    with TensorFile.create(path, {STACK: (3, 2, 2), "norm.weight": (5,)}) as file:
        file.write(ModelPiece(STACK, (2, 2), 1), torch.full((2, 2), 7.0))
        file.write(ModelPiece("norm.weight", (5,)), vector)
    tensors = load_file(path)
    assert torch.equal(tensors["norm.weight"], vector)
    assert tensors[STACK].sum((1, 2)).tolist() == [0, 28, 0]
    with TensorFile(path) as file:
        assert file.read(ModelPiece(STACK, (2, 2), 1)).sum() == 28


def test_tensor_file_reads_pieces_of_safetensors_file(tmp_path):
    path = tmp_path / "x.safetensors"
    stacked = torch.randn(4, 3, 2)
    save_file({STACK: stacked, "other": torch.randn(3)}, path)
    with TensorFile(path) as file:
        assert file.shapes == {STACK: (4, 3, 2), "other": (3,)}
        for expert in range(4):
            assert torch.equal(file.read(ModelPiece(STACK, (3, 2), expert)), stacked[expert])


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b"\xff" * 8, b"\x10" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_tensor_file_rejects_invalid_safetensors_content(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match="not a valid safetensors file"):
        TensorFile(path)


def test_tensor_file_recreate_retains_data_only_when_tensors_match(tmp_path):
    path = tmp_path / "x.safetensors"
    with TensorFile.recreate(path, {"a": (4,)}) as file:
        file.write(ModelPiece("a", (4,)), torch.ones(4))
    with TensorFile.recreate(path, {"a": (4,)}) as file:
        assert file.read_tensor("a").tolist() == [1.0] * 4
    with TensorFile.recreate(path, {"b": (4,)}) as file:
        assert file.read_tensor("b").tolist() == [0.0] * 4
    with TensorFile.recreate(path, {"b": (5,)}) as file:
        assert file.read_tensor("b").tolist() == [0.0] * 5
    path.write_bytes(path.read_bytes()[:-4])
    with TensorFile.recreate(path, {"b": (5,)}) as file:
        assert file.read_tensor("b").tolist() == [0.0] * 5


def test_tensor_file_rejects_truncated_file(tmp_path):
    path = tmp_path / "x.safetensors"
    TensorFile.create(path, {"a": (100,)}).close()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TensorFileError, match="not a valid safetensors file"):
        TensorFile(path)


def test_tensor_file_rejects_unsupported_dtype(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, dtype=torch.float64)}, path)
    with pytest.raises(TensorFileError, match="has tensors of F64"):
        TensorFile(path)


def test_tensor_file_write_rejects_piece_of_wrong_shape(tmp_path):
    with TensorFile.create(tmp_path / "x", {"a": (4,)}) as file, pytest.raises(TensorFileError, match="do not match"):
        file.write(ModelPiece("a", (5,)), torch.zeros(5))
