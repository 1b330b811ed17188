"""The loader benchmark measures tokens per CPU second and writes them."""

import numpy as np

from benchmarks.loader import SHORT_DOCUMENT, Row, measure, page, short_documents


def test_loader_benchmark_measures_throughput_and_formats_page(write_tokens, tmp_path):
    dataset = write_tokens([np.arange(5_000) % 256] * 20)
    row = measure(dataset, "files", sequence=64, rows=16, tokens=100_000)
    assert (row.documents, row.sequence, row.rows) == ("files", 64, 16)
    assert row.loader > 0
    assert row.limit > 0
    text = page([row, Row("short", 2048, 8, 50e6, 200e6)])
    assert "| short | 2,048 | 8 | 50 | 200 | 25% | 2.5 x |" in text
    short = short_documents(dataset, tmp_path / "short")
    assert short.tokens.tolist() == dataset.tokens.tolist()
    assert len(short) == 100_000 // SHORT_DOCUMENT
