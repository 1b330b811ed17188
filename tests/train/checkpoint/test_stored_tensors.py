"""Parts of tensors that several files have. `test_checkpointer` compares those of the checkpoint of every layout."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from phalanx.spec.errors import UserError
from phalanx.testing.fault_injection import truncate_file
from phalanx.train.checkpoint.chunked_tensor import Chunk
from phalanx.train.checkpoint.stored_tensors import StoredTensor

FULL = torch.arange(70.0).view(7, 5, 2)
QUARTERS = [(0, 0, 4, 3), (0, 3, 4, 2), (4, 0, 3, 3), (4, 3, 3, 2)]
"""First row and column, and numbers of rows and columns, of the parts in four files."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    chunks = []
    for number, (row, column, rows, columns) in enumerate(QUARTERS):
        file = folder / f"{number}.safetensors"
        save_file({"x": FULL[row : row + rows, column : column + columns].contiguous()}, file)
        chunks.append(Chunk(str(file), (row, column, 0), (rows, columns, 2)))
    read_slice = lambda file, name: safe_open(file, "pt").get_slice(name)  # noqa: E731
    return StoredTensor("x", FULL.shape, FULL.dtype, tuple(chunks), folder, read_slice)


@given(first=st.integers(0, 6), size=st.integers(0, 9))
def test_index_reads_rows_of_all_files(stored, first, size):
    assert torch.equal(stored[first : first + size], FULL[first : first + size])
    assert torch.equal(stored[first], FULL[first])
    assert torch.equal(stored[...], FULL)
    assert len(stored) == 7


def test_missing_and_damaged_parts_are_errors(stored):
    fewer = StoredTensor(
        stored.name, stored.shape, stored.dtype, stored.chunks[:3], stored.checkpoint, stored.read_slice
    )
    assert torch.equal(fewer[:4], FULL[:4])
    with pytest.raises(UserError, match=r"has damaged weights .*parts of x are missing"):
        fewer[3:5]
    file = Path(stored.chunks[0].place)
    content = file.read_bytes()
    truncate_file(file)
    with pytest.raises(UserError, match=r"has damaged weights .*SafetensorError"):
        stored[0]
    file.write_bytes(content)
