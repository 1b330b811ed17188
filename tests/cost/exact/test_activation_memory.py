from unittest import mock

import pytest

from phalanx.cost.exact.activation_memory import StageBlocks
from phalanx.cost.exact.parameters import count_parameters
from phalanx.spec.files.load import load_model_spec
from phalanx.spec.layers import expert_layers
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from tests.helpers.activations import activation_bytes

torch = pytest.importorskip("torch")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper  # noqa: E402

from phalanx.model.moe import Router  # noqa: E402
from phalanx.model.transformer import Transformer  # noqa: E402
from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing  # noqa: E402
from phalanx.parallel.cross_entropy import in_place_cross_entropy  # noqa: E402
from tests.helpers.batches import locate_documents  # noqa: E402
from tests.helpers.live_memory import PeakLiveBytes, SavedStorages  # noqa: E402
from tests.helpers.traced_block import balanced_router_logits  # noqa: E402

LLAMA = ModelSpec(
    vocab_size=100, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_hidden_size=48, max_seq_len=64
)
GPT2 = LLAMA.replace(
    num_kv_heads=4,
    norm="layernorm",
    activation="gelu_tanh",
    position_embedding="learned",
    bias=True,
    tie_embeddings=True,
)
MOE = {"num_experts": 6, "top_k": 3, "expert_ffn_size": 24, "num_leading_dense_layers": 1}
DEEPSEEK = {
    "num_shared_experts": 2,
    "router_score": "sigmoid",
    "normalize_top_k": False,
    "bias_update_rate": 0.1,
    "expert_ffn_size": 25,
}
SPECS = {
    "llama": LLAMA,
    "llama-wide": LLAMA.replace(tie_embeddings=True, head_dim=10, num_layers=1, ffn_hidden_size=400, vocab_size=7),
    "qwen3": LLAMA.replace(qk_norm="head", num_heads=6, head_dim=10),
    "one-kv-head": LLAMA.replace(qk_norm="head", num_kv_heads=1),
    "qk-norm-learned": LLAMA.replace(qk_norm="full", position_embedding="learned"),
    "gpt2": GPT2,
    "gelu-rotary": GPT2.replace(activation="gelu", position_embedding="rope", norm="rmsnorm", bias=False),
    "layernorm-swiglu": LLAMA.replace(norm="layernorm", qk_norm="head"),
    "windows-and-sinks": LLAMA.replace(sliding_window=5, full_attention_layers=[1], attention_sinks=True),
    "sinks": LLAMA.replace(attention_sinks=True),
    "dials": LLAMA.replace(
        attention_softcap=2.0,
        query_temperature={"scale": 0.5, "interval": 4},
        embedding_norm=True,
        norm_offset="layers",
    ),
    "mixtral": LLAMA.replace(moe=MOE),
    "deepseek": LLAMA.replace(moe=MOE | DEEPSEEK | {"balance_loss_scope": "micro_batch"}),
    "olmoe": LLAMA.replace(moe=MOE | {"num_shared_experts": 1, "top_k": 1}, qk_norm="full", norm="layernorm"),
}
PRECISIONS = {"fp32": ("fp32", False), "fp64": ("fp64", False), "autocast": ("bf16", True), "bf16": ("bf16", False)}


def rows_of_short_documents(rows, tokens):
    return torch.arange(tokens).div(10, rounding_mode="floor").mul(10).repeat(rows, 1)


def measure_saved_bytes(spec, batch, sequence, precision, layout, autocast, masked):
    """Return the live bytes after the trainer's forward pass and loss, and their peak during recomputation."""
    torch.manual_seed(0)
    model = Transformer(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to({"fp64": torch.float64, "bf16": torch.float32 if autocast else torch.bfloat16}.get(precision))
    apply_activation_checkpointing(model, layout.activation_checkpointing, layout.recomputed_blocks)
    saved, recomputations = SavedStorages(model), []

    def entered(block, args):  # the rotary tables are a tuple, which a checkpoint keeps without autograd
        for table in args[1] or ():
            saved.record(table)

    def save_recomputation(module, args, output):  # storages noted so far are still alive when the module is recomputed
        if layout.activation_checkpointing == "offload":  # recomputation reads the copy of the input
            host_copy = module.checkpoint_fn.func.newest().host_copy
            args = (saved.record(host_copy), *args[1:])
        recomputations.append((module._checkpoint_wrapped_module, args, dict(saved)))

    for block in model.blocks:
        block.register_forward_pre_hook(entered)
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            module.register_forward_hook(save_recomputation)
    tokens, targets = (torch.randint(spec.vocab_size, (batch, sequence)) for _ in range(2))
    documents = locate_documents(rows_of_short_documents(batch, sequence)) if masked else None
    saved.exclude_bounds(documents)
    with saved.record_saved_tensors(autocast):
        logits, _ = model(tokens, documents)
    with saved.record_saved_tensors(autocast=False):
        in_place_cross_entropy(logits, targets, -100)
    recomputed = 0
    for module, args, saved_before in recomputations:
        alive = SavedStorages(model)
        alive.update(saved_before)
        alive.exclude_bounds(documents)
        with alive.record_saved_tensors(autocast):
            module(*args)
        recomputed = max(recomputed, alive.bytes)
    return saved.bytes, recomputed


def build_on_rank(spec, precision, autocast, changes):
    """Return layout, mesh and strategy of a rank's part of a model, whose routing is balanced."""
    import torch.distributed as dist

    from phalanx.parallel import apply
    from phalanx.parallel.mesh import build_mesh

    layout = Layout(data_parallel="ddp" if autocast or precision != "bf16" else "zero1", **changes)
    mesh, cpu = build_mesh(layout, dist.get_world_size(), "cpu"), torch.device("cpu")
    # Use autocast as with several replicas.
    with mock.patch.object(apply, "replica_strategy", lambda strategy, *_: strategy):
        strategy = apply.apply_layout(spec, layout, mesh, cpu, lambda name, shape: 0.1 * torch.randn(shape), precision)
    for part in strategy.module.modules():
        if isinstance(part, Router):
            part.bias = torch.zeros(spec.moe.num_experts)
            part.gate.register_forward_hook(lambda gate, args, logits: balanced_router_logits(logits))
    return layout, mesh, strategy


def measure_saved_bytes_on_rank(cases):
    """Return the live bytes after forward pass and loss of a rank's part of each model, by (spec, precision,
    autocast, layout, masked). With expert parallelism, routing is balanced."""
    from phalanx.parallel.context_parallel import local_token_indices

    saved_bytes = []
    for spec, precision, autocast, changes, masked in cases:
        layout, mesh, strategy = build_on_rank(spec, precision, autocast, changes)
        model = strategy.module
        saved = SavedStorages(model)

        def entered(block, args, saved=saved):
            for table in args[1] or ():
                saved.record(table)

        for block in model.blocks:
            block.register_forward_pre_hook(entered)
        rank = mesh.cp_mesh.get_local_rank() if mesh.cp_mesh else 0
        local_tokens = local_token_indices(20, layout.cp, rank, layout.cp_method)
        tokens, targets = (torch.randint(spec.vocab_size, (6, 20))[:, local_tokens] for _ in range(2))
        documents = locate_documents(rows_of_short_documents(6, 20)) if masked else None
        saved.exclude_bounds(documents)
        with saved.record_saved_tensors(autocast):
            logits, _ = model(tokens, documents)
        with saved.record_saved_tensors(autocast=False):
            strategy.cross_entropy(logits, targets, -100)
        saved_bytes.append(saved.bytes)
    return saved_bytes


DENSE = ("llama", "qwen3", "one-kv-head", "qk-norm-learned", "gpt2", "gelu-rotary", "layernorm-swiglu")
SPARSE = ("mixtral", "deepseek", "olmoe")
# Three heads of eight columns: each of two ranks has one and a half.
THREE_HEADS = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8}
THREE_HEAD_SPECS = {f"{name}-of-columns": SPECS[name].replace(**THREE_HEADS) for name in (*DENSE, "mixtral")}
GATHERED_HEADS_LAYOUT = {"tp": 2, "tp_attention": "gathered"}
PARALLEL_LAYOUTS = {
    "gathered-heads": (GATHERED_HEADS_LAYOUT, tuple(THREE_HEAD_SPECS)),
    "gathered-heads-of-whole-tokens": (GATHERED_HEADS_LAYOUT | {"sequence_parallel": False}, tuple(THREE_HEAD_SPECS)),
    "shared-tokens": ({"tp": 2}, (*DENSE, *SPARSE, "windows-and-sinks")),
    "whole-tokens": ({"tp": 2, "sequence_parallel": False}, (*DENSE, *SPARSE)),
    "ring": ({"cp": 2, "cp_method": "ring"}, (*DENSE, *SPARSE, "sinks")),
    "ulysses": ({"cp": 2, "cp_method": "ulysses"}, (*DENSE, *SPARSE, "windows-and-sinks")),
    "experts": ({"ep": 2}, SPARSE),
    "experts-of-shared-tokens": ({"ep": 2, "tp": 2}, SPARSE),
    "experts-of-shared-sequences": ({"ep": 2, "cp": 2}, SPARSE),
}


@pytest.mark.parametrize("mode", ["none", "norms", "full"])
@pytest.mark.parametrize(("changes", "names"), PARALLEL_LAYOUTS.values(), ids=PARALLEL_LAYOUTS)
def test_activation_bytes_equals_saved_tensors_on_tp_cp_and_ep_ranks(changes, names, mode):
    """Tensor parallelism splits heads, inner widths and logits, and with sequence parallelism the tokens of the
    residual stream. Context parallelism splits tokens, and expert parallelism experts."""
    from phalanx.testing import rank_pool

    cases = [
        ((SPECS | THREE_HEAD_SPECS)[name], *PRECISIONS[numbers], changes | {"activation_checkpointing": mode}, masked)
        for name in names
        for numbers in PRECISIONS
        for masked in (False, True)
    ]
    expected = [
        activation_bytes(spec, 6, 20, precision, Layout(**layout), autocast, masked).total
        for spec, precision, autocast, layout, masked in cases
    ]
    measured = rank_pool(2).run(measure_saved_bytes_on_rank, cases)
    assert dict(zip(map(str, cases), measured[0], strict=True)) == dict(zip(map(str, cases), expected, strict=True))


CHECKPOINTING = {
    "none": {},
    "norms": {"activation_checkpointing": "norms"},
    "norms-in-two": {"activation_checkpointing": "norms", "recomputed_blocks": 2},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "selective-in-two": {"activation_checkpointing": "selective", "recomputed_blocks": 2},
    "full-in-one": {"activation_checkpointing": "full", "recomputed_blocks": 1},
    "full-in-two": {"activation_checkpointing": "full", "recomputed_blocks": 2},
    "offload-in-two": {"activation_checkpointing": "offload", "recomputed_blocks": 2},
}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("precision_name", PRECISIONS)
@pytest.mark.parametrize("name", SPECS)
def test_activation_bytes_equals_saved_tensors_on_one_rank(name, precision_name, mode, masked):
    precision, autocast = PRECISIONS[precision_name]
    layout = Layout(**CHECKPOINTING[mode])
    measured = measure_saved_bytes(SPECS[name], 3, 20, precision, layout, autocast, masked)
    predicted = activation_bytes(SPECS[name], 3, 20, precision, layout, autocast, masked)
    assert (predicted.total, predicted.recomputed) == measured


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SPECS)
def test_activation_bytes_is_linear_in_batch_size(name, mode):
    one, two, three = (
        activation_bytes(SPECS[name], n, 64, "bf16", Layout(activation_checkpointing=mode), True) for n in (1, 2, 3)
    )
    for part in ("checkpoints", "norms", "attention", "mlp", "loss"):
        assert getattr(two, part) == 2 * getattr(one, part), part
    assert three.total - two.total == two.total - one.total  # the rest does not depend on the batch
    assert two.weight_copies == one.weight_copies


@pytest.mark.parametrize(("ranks", "saved_fraction"), [(4, 0.75), (8, 0.875)])
def test_activation_bytes_shrinks_when_ranks_split_the_batch(ranks, saved_fraction):
    full_batch, share = (activation_bytes(LLAMA, batch, 64, "fp32").total for batch in (64, 64 // ranks))
    assert 1 - share / full_batch == pytest.approx(saved_fraction, abs=0.01)


def test_autocast_weight_copies_count_each_matrix_once():
    for spec in (LLAMA, GPT2, SPECS["deepseek"]):
        copies = activation_bytes(spec, 1, 16, "bf16", autocast=True).weight_copies
        assert copies == 2 * (count_parameters(spec).block_matrices + spec.vocab_size * spec.hidden_size)
    assert activation_bytes(LLAMA, 1, 16, "fp32", autocast=True) == activation_bytes(LLAMA, 1, 16, "fp32")


def test_head_and_loss_dominate_activation_bytes_of_small_models():
    small = activation_bytes(LLAMA.replace(vocab_size=8192), 4, 64, "bf16", autocast=True)
    assert small.head_and_loss > small.total / 2
    assert small.loss == 2**20 * 4 + 4 * 64 * 46  # one of two chunks, and some numbers per row


@pytest.mark.parametrize("mode", ["none", "norms", "full", "full-in-one", "full-in-two"])
@pytest.mark.parametrize("precision_name", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_activation_peak_equals_measured_peak_of_forward_and_backward(name, precision_name, mode):
    (precision, autocast), spec = PRECISIONS[precision_name], SPECS[name].replace(vocab_size=6000)
    dtypes = {"fp64": torch.float64, "bf16": torch.float32 if autocast else torch.bfloat16}
    model = Transformer(spec).to(dtypes.get(precision))
    layout = Layout(**CHECKPOINTING[mode])
    apply_activation_checkpointing(model, layout.activation_checkpointing, layout.recomputed_blocks)
    tokens, targets = (torch.randint(spec.vocab_size, (3, 20)) for _ in range(2))

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits, auxiliary = model(tokens)
        return in_place_cross_entropy(logits, targets, -100) + auxiliary

    with PeakLiveBytes() as alive:
        loss().backward()
    measured = alive.peak + tokens.nbytes + targets.nbytes
    auxiliary_loss = model(tokens[:1, :1])[1].nbytes
    moe_layers = len(expert_layers(spec))
    ends_of_expert_rows = 8 * moe_layers * spec.moe.num_experts if spec.moe else 0
    predicted = activation_bytes(spec, 3, 20, precision, layout, autocast).peak
    assert measured == predicted + auxiliary_loss + ends_of_expert_rows


@pytest.mark.parametrize(("name", "tp", "limit"), [("llama3-405b", 8, 52_000), ("llama3-8b", 1, 111_000)])
def test_layer_of_llama3_saves_bytes_per_token(name, tp, limit):
    """Before activations were recomputed and documents had masks, the numbers were 119,400 and 233,600."""
    layout = Layout(data_parallel="zero3", tp=tp)
    block = activation_bytes(
        load_model_spec(name), 1, 8192, "bf16", layout, masked=True, stage=StageBlocks(layers=range(1, 2))
    )
    assert (block.norms + block.attention + block.mlp) / 8192 < limit


def test_layer_of_llama3_saves_a_seventh_less_without_outputs_of_norms():
    stage = StageBlocks(layers=range(1, 2), recomputed=1)
    none, norms = (
        activation_bytes(
            load_model_spec("llama3-8b"), 1, 8192, "bf16", Layout(activation_checkpointing=mode), stage=stage
        )
        for mode in ("none", "norms")
    )
    saved = [block.norms + block.attention + block.mlp for block in (none, norms)]
    assert saved[0] - saved[1] == 2 * 8192 * 4096 * 2
    assert 1 - saved[1] / saved[0] == pytest.approx(0.148, abs=0.001)
