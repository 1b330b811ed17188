"""Import and checks of the user's own components."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.spec.components import ComponentSpec
from phalanx.spec.errors import UserError
from phalanx.train.components import bind_component, build_network, call_component, import_component
from tests.helpers.small_runs import small_run


class NoModule:
    """A class that accepts a description, but is not a module."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec


class TokensOnly(nn.Module):
    """A network whose forward method does not accept documents."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.head = nn.Embedding(spec.vocab_size, spec.vocab_size)

    def forward(self, tokens: Any) -> Any:
        return self.head(tokens)


def component(path: str, **arguments: Any) -> ComponentSpec:
    return ComponentSpec.model_validate({"class": path, **arguments})


def test_import_component_names_missing_module() -> None:
    with pytest.raises(UserError, match=r"training\.loss = 'no_such:f' cannot be imported"):
        import_component("training.loss", component("no_such:f"))


def test_call_component_passes_arguments_of_run_file() -> None:
    assert call_component("field", component("builtins:dict", a=1), b=2) == {"a": 1, "b": 2}
    with pytest.raises(UserError, match=r"field = 'fnmatch:fnmatch' does not accept these arguments"):
        call_component("field", component("fnmatch:fnmatch", pattern="*"))


def test_bind_component_checks_arguments_before_first_call() -> None:
    bound = bind_component("optimizer.lr_function", component("operator:add"), 0, 1)
    assert bound(2, 3) == 5
    with pytest.raises(UserError, match=r"optimizer\.lr_function = 'fnmatch:translate' does not accept"):
        bind_component("optimizer.lr_function", component("fnmatch:translate", wrong=1), 0, 1)


@pytest.mark.parametrize(
    ("name", "masks", "problem"),
    [
        ("NoModule", False, "model.implementation = .*does not return a torch.nn.Module"),
        ("TokensOnly", True, "data.mask_documents = True requires a forward method with the parameter `documents`"),
    ],
)
def test_build_network_rejects_unsuitable_class(
    name: str, masks: bool, problem: str, documents: Path, tmp_path: Path
) -> None:
    run = small_run(documents, tmp_path, {"data.mask_documents": masks})
    with pytest.raises(UserError, match=problem):
        build_network(run, component(f"{__name__}:{name}"))


def test_build_network_draws_equal_weights_on_every_call(documents: Path, tmp_path: Path) -> None:
    run = small_run(documents, tmp_path, {"data.mask_documents": False})
    state = torch.get_rng_state()
    first, second = (build_network(run, component(f"{__name__}:TokensOnly")) for _ in range(2))
    assert state.equal(torch.get_rng_state()), "the caller's random numbers are unchanged"
    assert first.head.weight.equal(second.head.weight)
