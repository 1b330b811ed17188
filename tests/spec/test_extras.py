"""Planning needs no PyTorch, and errors about other missing packages contain the command that installs them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.spec.extras import EXTRA_OF_PACKAGE, missing_package

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DISTRIBUTIONS = {
    "grpc": "grpcio",
    "lm_eval": "lm-eval",
    "mlflow": "mlflow-skinny",
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
}
"""Distributions whose name differs from that of the imported package."""


@pytest.mark.parametrize("package", sorted(EXTRA_OF_PACKAGE))
def test_missing_package_names_extra_that_installs_it(package: str) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    requirements = project["optional-dependencies"][EXTRA_OF_PACKAGE[package]]
    assert any(requirement.startswith(f"{DISTRIBUTIONS.get(package, package)}>=") for requirement in requirements)
    assert not any(requirement.startswith(package) for requirement in project["dependencies"])
    assert f"pip install '.[{EXTRA_OF_PACKAGE[package]}]'" in str(missing_package("x", None, package))


def test_training_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npreset = "tiny"\n')
    program = "import sys; sys.modules['torch'] = None; from phalanx.cli.main import main; main()"
    # Use a new process, because the warm process has imported torch.
    command = [sys.executable, "-c", program, "train", "run.toml"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2
    assert process.stderr.endswith(
        "requires torch, which is not installed\n  fix: in a clone of Phalanx, pip install '.[train]'\n"
    )
    assert "Traceback" not in process.stderr
