"""Settings of a rank before it trains."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from phalanx.launch import process
from phalanx.launch.process import select_device, select_nproc, set_gpu_environment, use_deterministic_kernels
from phalanx.spec.errors import UserError
from phalanx.spec.open_files import raise_open_files_limit
from phalanx.spec.run import RunSpec
from phalanx.testing import rank_pool
from tests.helpers.small_runs import MOE, small_run, train_and_evaluate


def train_with_deterministic_kernels(run: RunSpec) -> tuple[list[tuple[float, float]], bool]:
    use_deterministic_kernels()
    try:
        return train_and_evaluate(run), torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_exist_for_all_that_a_run_of_experts_computes(text: Path, tmp_path: Path) -> None:
    run = small_run(text, tmp_path, {"model": MOE, "training.steps": 2, "optimizer.name": "muon", "layout.ep": 2})
    expected = rank_pool(2).run(train_and_evaluate, run)
    for rank, (result, was_deterministic) in enumerate(rank_pool(2).run(train_with_deterministic_kernels, run)):
        assert was_deterministic
        assert result == expected[rank]


def test_open_files_limit_is_raised_to_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


GPU_VARIABLES = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("by_user", "expected"),
    [
        ({}, ("32", "expandable_segments:True", None)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, ("32", None, "max_split_size_mb:512")),
        ({"PYTORCH_ALLOC_CONF": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ("1", "", None)),
    ],
)
def test_gpu_environment_keeps_what_the_user_set(
    by_user: dict[str, str], expected: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", by_user)
    set_gpu_environment()
    assert tuple(by_user.get(name) for name in GPU_VARIABLES) == expected


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_gpu_environment_is_set_before_a_gpu_is_looked_for(
    device: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        return False

    for name in GPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert select_device(small_run(text, tmp_path, {"cluster.device": device})) == "cpu"
    assert seen == (["expandable_segments:True"] if device == "auto" else [])


def fp8_run(text: Path, out: Path) -> RunSpec:
    return small_run(text, out, {"model": {**MOE, "hidden_size": 64}, "training.precision": "fp8"})


@pytest.mark.parametrize("capabilities", [[], [9.0, 10.0]])
def test_gpus_with_float8_products_are_accepted(
    capabilities: list[float], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(process, "query_gpus", lambda _: capabilities)
    assert select_nproc(fp8_run(text, tmp_path)) == 2


def test_gpu_without_float8_products_is_rejected(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(process, "query_gpus", lambda _: [9.0, 8.6])
    with pytest.raises(UserError, match=r"training\.precision = 'fp8' requires compute capability 9\.0 .* 8\.6"):
        select_nproc(fp8_run(text, tmp_path))


def write_nvidia_smi(folder: Path, output: str) -> None:
    """Write a program that prints `output`, and writes its arguments to the file "arguments"."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho \"$@\" > {folder}/arguments\nprintf '{output}'\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("9.0\\n8.6\\n", [9.0, 8.6]), ("[N/A]\\n9.0\\n", [9.0]), ("[Not Supported]\\n", []), ("", [])],
)
def test_values_of_gpus_that_are_not_numbers_are_skipped(
    output: str, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nvidia_smi(tmp_path, output)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.query_gpus("compute_cap") == expected


@pytest.mark.parametrize(("visible", "option"), [(None, ""), ("", ""), ("1, 3", " --id=1,3")])
def test_only_visible_gpus_are_queried(
    visible: str | None, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nvidia_smi(tmp_path, "9.0\\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert process.query_gpus("compute_cap") == [9.0]
    arguments = (tmp_path / "arguments").read_text().rstrip()
    assert arguments == f"--query-gpu=compute_cap --format=csv,noheader,nounits{option}"


def test_gpus_of_machine_without_nvidia_smi_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert process.query_gpus("compute_cap") == []
