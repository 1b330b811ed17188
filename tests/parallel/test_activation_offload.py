import gc
from weakref import ref

import torch
from torch import nn

from phalanx.parallel.activation_checkpointing import apply_activation_checkpointing
from phalanx.parallel.activation_offload import HostCopier

COPIER = HostCopier(torch.device("cpu"))


def offloads(model, mode="offload"):
    apply_activation_checkpointing(model, mode)
    return [block.checkpoint_fn.func for block in model.blocks]


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_micro_batches_in_flight_keep_their_own_inputs(build_model, tokens):
    """As in pipelines, the order of backward passes differs from that of forward passes."""

    def train(mode, order):
        model = build_model(num_layers=3)
        apply_activation_checkpointing(model, mode)
        losses = [model(tokens.roll(shift, 1))[0].logsumexp(-1).sum() for shift in range(3)]
        for index in order:
            losses[index].backward()
        return gradients(model)

    for order in ([0, 1, 2], [2, 0, 1]):
        assert all(map(torch.equal, train("offload", order), train("none", order)))


def test_input_of_block_is_freed_after_its_forward_pass(build_model, tokens):
    model = build_model(num_layers=3)
    apply_activation_checkpointing(model, "offload")
    inputs = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(ref(args[0])))
    logits, _ = model(tokens)
    gc.collect()
    assert logits.requires_grad
    assert [x() for x in inputs] == [None] * 3


def test_backward_pass_fetches_one_block_ahead_and_frees_host_copies(build_model, tokens):
    model = build_model(num_layers=3)
    blocks = offloads(model)
    logits, _ = model(tokens)
    stored = [block.newest() for block in blocks]
    assert all(block_input.host_copy is not None and block_input.fetched is None for block_input in stored)
    states = []
    for block in model.blocks:  # recomputed blocks run again, the last first
        block._checkpoint_wrapped_module.register_forward_pre_hook(
            lambda *_: states.append([block_input.host_copy is not None for block_input in stored])
        )
    logits.sum().backward()
    assert states == [[True, False, False], [False, False, False], [False, False, False]]
    stored.clear()
    gc.collect()
    assert [block.newest() for block in blocks] == [None] * 3


def test_evaluation_copies_nothing(build_model, tokens):
    model = build_model(num_layers=3)
    blocks = offloads(model)
    with torch.no_grad():
        model(tokens)
    assert [block.newest() for block in blocks] == [None] * 3


def test_copies_have_the_numbers_of_any_memory_layout():
    x = torch.arange(12.0).view(3, 4).t()
    buffer = COPIER.take_buffer(x)
    COPIER.wait(COPIER.start_copy(x, buffer))
    assert torch.equal(buffer, x)
    assert buffer.data_ptr() != x.data_ptr()


def test_blocks_that_are_not_recomputed_are_not_wrapped(build_model):
    model = build_model(num_layers=3)
    apply_activation_checkpointing(model, "offload", num_blocks=1)
    assert [isinstance(getattr(block, "_checkpoint_wrapped_module", None), nn.Module) for block in model.blocks] == [
        True,
        False,
        False,
    ]
