"""Memory of the head and the loss in chunks of tokens, compared with measured tensors."""

import pytest

from phalanx.spec import chunks
from phalanx.spec.layout import Layout
from tests.helpers.activations import activation_bytes

torch = pytest.importorskip("torch")

from phalanx.model.transformer import Transformer  # noqa: E402
from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing  # noqa: E402
from phalanx.parallel.linear_cross_entropy import ChunkedLoss  # noqa: E402
from tests.cost.exact.test_activation_memory import PRECISIONS, SPECS  # noqa: E402
from tests.helpers.live_memory import PeakLiveBytes, SavedStorages  # noqa: E402

DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
VOCAB = 6000


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("rows", [7, 25], ids=["nine-chunks", "three-chunks"])
@pytest.mark.parametrize("row_logits", [2**20, 2**14], ids=["whole-chunks", "few-rows"])
@pytest.mark.parametrize("precision_name", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bytes_of_chunked_loss_equal_measured_peak_and_saved_tensors(
    name, precision_name, row_logits, rows, mode, monkeypatch
):
    (precision, autocast), spec = PRECISIONS[precision_name], SPECS[name].replace(vocab_size=VOCAB)
    model = Transformer(spec).to(None if autocast else DTYPES.get(precision))
    layout = Layout(activation_checkpointing=mode)
    apply_activation_checkpointing(model, layout.activation_checkpointing, layout.recomputed_blocks)
    tokens, targets = (torch.randint(VOCAB, (3, 20)) for _ in range(2))
    itemsize = {"fp64": 8, "fp32": 4}.get(precision, 2)
    monkeypatch.setattr(chunks, "LOGITS_CHUNK_BYTES", rows * VOCAB * itemsize)
    monkeypatch.setattr(chunks, "CPU_LOSS_LOGITS", row_logits)
    head = ChunkedLoss(columns=VOCAB, itemsize=itemsize)(targets, -100)

    def total_loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return sum(model(tokens, head=head))

    predicted = activation_bytes(spec, 3, 20, precision, layout, autocast)
    saved = SavedStorages(model)

    def record_tables(block, args):
        for table in args[1] or ():
            saved.record(table)

    for block in model.blocks:
        block.register_forward_pre_hook(record_tables)
    with saved.record_saved_tensors(autocast):
        model(tokens, head=head)
    assert saved.bytes == predicted.total
    saved.clear()
    auxiliary_bytes = model(tokens[:1, :1])[1].nbytes
    model.embedding.weight.requires_grad_(spec.tie_embeddings)  # otherwise its gradient is part of the peak
    with PeakLiveBytes() as alive:
        loss = total_loss()
        assert alive.peak + tokens.nbytes + targets.nbytes == predicted.at_backward_start + auxiliary_bytes
        if not spec.tie_embeddings:
            loss.backward()
            assert alive.peak + tokens.nbytes + targets.nbytes == predicted.peak + auxiliary_bytes
