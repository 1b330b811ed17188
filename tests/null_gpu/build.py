"""Build the null GPU: a library that is preloaded in place of CUDA, cuBLAS and NCCL.

    python -m tests.null_gpu.build OUT

The Python must have PyTorch's CUDA build. Functions of the libraries that
are missing in native/ do nothing and return 0."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

NATIVE = Path(__file__).parent / "native"
PACKAGES = Path(torch.__file__).parents[1]
DRIVER = PACKAGES / "triton/backends/nvidia/include"
INCLUDE = [PACKAGES / "nvidia/cu13/include", PACKAGES / "nvidia/nccl/include", DRIVER]


def called_functions() -> set[str]:
    """Return the functions of CUDA's runtime, cuBLAS and NCCL that PyTorch calls, and all of the driver's."""
    called = set()
    for library in (PACKAGES / "torch/lib").glob("*.so"):
        nm_output = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        called |= {line.split()[-1].split("@")[0] for line in nm_output.stdout.splitlines()}
    called = {name for name in called if re.match(r"(__)?cuda[A-Z]|cublas|nccl[A-Z]", name)}
    return called | set(re.findall(r"\bCUresult CUDAAPI (cu\w+)\(", (DRIVER / "cuda.h").read_text()))


def build(out: Path) -> Path:
    """Build the library in `out`; return the folder for LD_LIBRARY_PATH,
    in which it is also the driver, libcuda.so.1."""
    (out / "lib").mkdir(parents=True, exist_ok=True)
    sources = sorted(NATIVE.glob("*.c"))
    source_text = "".join(source.read_text() for source in sources)
    defined = set(re.findall(r"\b((?:__)?cu(?:da|blas)?\w+|nccl\w+)\(", source_text)) | set(
        re.findall(r"PRODUCT\((\w+)\)", source_text)
    )
    missing = sorted(called_functions() - defined)
    stubs = out / "stubs.c"
    stubs.write_text(
        "long null_stub(void) { return 0; }\n"
        + "".join(f'long {name}(void) __attribute__((alias("null_stub")));\n' for name in missing)
    )
    library = out / "lib" / "libnullgpu.so"
    flags = ["-O1", "-g", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in INCLUDE)]
    subprocess.run(["cc", *flags, *sources, stubs, "-o", library, "-lpthread", "-ldl"], check=True)
    for name in ("libcuda.so.1", "libcuda.so"):
        link = out / "lib" / name
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)
    return out / "lib"


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
