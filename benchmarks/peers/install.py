"""Installation of the other trainers into their own environment `.venv-peers`, with our version of PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.launch import ROOT

FOLDER = ROOT / ".venv-peers"
PEERS = ("deepspeed==0.19.8", "ai2-olmo-core==3.0.0")
# DeepSpeed is built from source with the installed torch; its C++ ops are not used.
BUILD = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def install() -> Path:
    """Install the peers and Phalanx unless they are installed; return their Python."""
    python, mark = FOLDER / "bin" / "python", FOLDER / "installed.json"
    wanted = [f"torch=={version('torch').partition('+')[0]}", *PEERS]
    if mark.is_file() and json.loads(mark.read_text()) == wanted:
        return python
    print(f"installing {', '.join(wanted)} into {FOLDER.name} ...", file=sys.stderr)
    venv.create(FOLDER, with_pip=True)
    constraints = FOLDER / "constraints.txt"
    constraints.write_text("\n".join(wanted))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, "torch", "setuptools", "wheel", "ninja", "py-cpuinfo"], check=True)
    packages = [peer.partition("==")[0] for peer in PEERS]
    subprocess.run(
        [*pip, "--no-build-isolation", "--editable", str(ROOT), *packages], check=True, env={**os.environ, **BUILD}
    )
    mark.write_text(json.dumps(wanted))
    return python
