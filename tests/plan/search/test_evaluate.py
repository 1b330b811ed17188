"""Predicted time of communication across nodes, compared with the bytes that leave by the busiest NIC."""

import numpy as np
import pytest

from phalanx.plan.placement.traffic_matrix import traffic_matrices
from phalanx.plan.search.candidate_columns import candidate_jobs
from phalanx.plan.search.candidates import candidate_from_run
from phalanx.plan.search.evaluate import evaluate_layout, layout_to_text, parse_layout
from phalanx.plan.tables.job_columns import time_constants_for
from phalanx.spec.resolved_run import ResolvedRun
from tests.helpers.planned_runs import make_run

ULYSSES = "cp_method=ulysses,micro_batch_size=1"
CASES = [
    ("llama3-8b", 65536, f"cp=16,{ULYSSES}", 2, 50e9),
    ("llama3-8b", 65536, f"cp=16,{ULYSSES}", 2, 2e9),
    ("llama3-8b", 131072, f"cp=32,{ULYSSES}", 4, 2e9),
    ("llama3-8b", 32768, f"tp=2,cp=16,{ULYSSES}", 4, 12.5e9),
    ("llama3-8b", 32768, f"cp=16,activation_checkpointing=full,{ULYSSES}", 4, 12.5e9),
    ("llama3-8b", 32768, f"cp=16,activation_checkpointing=selective,{ULYSSES}", 4, 12.5e9),
    ("llama3-70b", 32768, f"tp=4,cp=4,{ULYSSES}", 4, 25e9),
    ("llama3-70b", 32768, f"tp=8,cp=8,{ULYSSES}", 8, 50e9),
    ("gpt3-175b", 2048, f"cp=32,{ULYSSES}", 4, 5e9),
    ("mixtral-8x7b", 4096, "ep=8,pp=4", 4, 2e9),
    ("qwen3-30b-a3b", 4096, "ep=32", 4, 50e9),
    ("qwen3-30b-a3b", 4096, "ep=64,tp=2", 8, 2e9),
    ("olmoe-1b-7b", 4096, "ep=64", 8, 12.5e9),
    ("olmoe-1b-7b", 4096, "ep=16,activation_checkpointing=full", 2, 2e9),
]


@pytest.mark.parametrize(("model", "sequence", "text", "nodes", "network"), CASES)
def test_all_to_all_across_nodes_takes_bytes_of_busiest_card(model, sequence, text, nodes, network):
    """Half the bandwidth adds the time of the bytes of every rank's tensors, by sender and receiver."""
    ranks, layout = 8 * nodes, parse_layout(text)

    def exchange_seconds(bytes_per_second: float) -> float:
        cluster = {"nodes": nodes, "network_bytes_per_second": bytes_per_second}
        run = make_run(model, sequence=sequence, sequences=2 * ranks, cluster=cluster)
        return evaluate_layout(ResolvedRun(run, ranks), layout).parts["exchange"]

    run = make_run(model, sequence=sequence, sequences=2 * ranks, cluster={"nodes": nodes})
    matrices = traffic_matrices(ResolvedRun(run.model_copy(update={"layout": layout}), ranks), island=8)
    matrix = matrices["cp" if layout.cp > 1 else "ep"]
    leaves_node = matrix.source // 8 != matrix.target // 8
    card_bytes = np.bincount(matrix.source[leaves_node], matrix.bytes[leaves_node]).max()
    card_seconds = card_bytes / (network * time_constants_for(run.cluster).network)
    assert exchange_seconds(network / 2) - exchange_seconds(network) == pytest.approx(card_seconds, rel=0.01)
    assert exchange_seconds(network) > card_seconds


def test_ulysses_across_nodes_sends_what_arithmetic_says():
    """Two nodes have one rank per NIC. Of 65,536 / 16 tokens with 32 heads of queries, 2 x 16 of keys
    and values (8 and their copies) and 32 of outputs, 128 wide in bf16, half leaves the node:
    forward and backward, 32 blocks, 32 sequences."""
    sent_bytes = 4096 * (32 + 2 * 16 + 32) * 128 * 2 / 2 * 2 * 32 * 32
    cluster = {"nodes": 2, "network_bytes_per_second": 2e9}
    run = make_run(sequence=65536, sequences=32, cluster=cluster)
    exchange = evaluate_layout(ResolvedRun(run, 16), parse_layout(f"cp=16,{ULYSSES}")).parts["exchange"]
    assert exchange == pytest.approx(sent_bytes / (2e9 * time_constants_for(run.cluster).network), rel=0.01)


def test_ring_attention_across_nodes_takes_bytes_of_the_card_between_nodes():
    """Keys and values are sent 15 times forward and backward, and their fp32 gradients 15 times backward. The
    traffic count has one more hop of gradients, which returns them to their rank."""
    layout = parse_layout("cp=16,cp_method=ring,micro_batch_size=1")
    cluster = {"nodes": 2, "network_bytes_per_second": 1e8}
    run = make_run(sequence=65536, sequences=32, cluster=cluster).model_copy(update={"layout": layout})
    matrix = traffic_matrices(ResolvedRun(run, 16), island=8)["cp"]
    home_bytes = 32 * 32 * 4096 * 2 * 8 * 128 * 4
    card_bytes = matrix.bytes[matrix.source // 8 != matrix.target // 8].max() - home_bytes
    option = evaluate_layout(ResolvedRun(run, 16), layout)
    card_seconds = card_bytes / (1e8 * time_constants_for(run.cluster).network)
    assert option.parts["exchange"] == pytest.approx(card_seconds - 0.8 * option.parts["compute"], rel=0.1)


def test_parse_layout_reads_number_of_recomputed_blocks_per_pipeline_rank():
    layout = parse_layout("pp=2, activation_checkpointing=full, recomputed_blocks=[2, 0], tp=2")
    assert (layout.pp, layout.recomputed_blocks, layout.tp) == (2, (2, 0), 2)
    assert parse_layout(layout_to_text(layout)) == layout


@pytest.mark.parametrize(
    ("text", "is_one_graph"),
    [("data_parallel=zero3", True), ("data_parallel=zero3,tp=2", False), ("pp=4,schedule=zb-h1", False)],
)
def test_compilation_speeds_up_blocks_of_one_graph_and_elementwise_functions_of_others(text, is_one_graph):
    run = make_run(training={"compile": True})
    columns = candidate_jobs(
        ResolvedRun(run, 8), [candidate_from_run(ResolvedRun(run.model_copy(update={"layout": parse_layout(text)}), 8))]
    )
    assert (columns.compiled[0], columns.fused_elementwise[0]) == (is_one_graph, not is_one_graph)
    eager, compiled = (
        evaluate_layout(ResolvedRun(make_run(training={"compile": compile}), 8), parse_layout(text)).step_seconds
        for compile in (False, True)
    )
    assert compiled < eager
