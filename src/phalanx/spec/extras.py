"""Packages required by parts of Phalanx only: the optional dependencies of pyproject.toml.

The package `phalanx` of PyPI is another project: extras are installed from a clone.
"""

from __future__ import annotations

from phalanx.spec.errors import UserError

EXTRA_OF_PACKAGE = {
    "torch": "train",
    "tokenizers": "train",
    "safetensors": "train",
    "huggingface_hub": "train",
    "tensorboard": "train",
    "datasets": "data",
    "s3fs": "cloud",
    "gcsfs": "cloud",
    "adlfs": "cloud",
    "aiohttp": "cloud",
    "pyarrow": "data",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "opentelemetry": "opentelemetry",
    "pynvml": "gpu",
    "lm_eval": "evaluate",
    "matplotlib": "draw",
    "grpc": "swarm",
    "cryptography": "swarm",
    "xxhash": "swarm",
    "networkx": "swarm",
}


def missing_package(field: str, value: object, package: str, instead: str = "") -> UserError:
    """Return the error for a package that is not installed.

    The fix is the command that installs the package.
    """
    fix = f"in a clone of Phalanx, pip install '.[{EXTRA_OF_PACKAGE[package]}]'" + (
        f"; or {instead}" if instead else ""
    )
    return UserError(field, value, f"requires {package}, which is not installed", fix)
