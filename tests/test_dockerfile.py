"""The Dockerfile: its lines run in a root directory that has only Debian's smallest system, without docker."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
STEP_SECONDS = 1500
RUN_FILE = """
name = "image"
model.preset = "tiny"
data.train = ["/usr/lib/python3.11/json"]
training = { steps = 2, seq_len = 64, tokens_per_step = 256 }
"""


def read_dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with their arguments."""
    lines = [line for line in (REPOSITORY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    logical_lines = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in logical_lines if line]


def copied_paths() -> Iterator[tuple[Path, str]]:
    """Yield the sources of COPY with their targets."""
    for instruction, arguments in read_dockerfile():
        if instruction == "COPY":
            *sources, target = arguments.split()
            yield from ((Path(source), target) for source in sources)


def test_dockerfile_copies_what_the_package_is_built_from() -> None:
    sources = [source for source, _ in copied_paths()]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    licenses = [path for pattern in project["license-files"] for path in REPOSITORY.glob(pattern)]
    for path in (Path("pyproject.toml"), Path("src"), Path(project["readme"]), *licenses):
        parts = (REPOSITORY / path).relative_to(REPOSITORY)
        assert any(parts.is_relative_to(source) for source in sources), f"{parts} is not in the image"


def test_dockerignore_admits_what_the_dockerfile_copies() -> None:
    admitted = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert admitted == {str(source) for source, _ in copied_paths()}


class CleanRoot:
    """A root directory in which instructions of a Dockerfile run, with the package registries of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        self.directory = "/"
        command = [sys.executable, "-m", "pip", "config", "list"]
        options = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.pip_variables: dict[str, str] = {}
        # Mounts: what docker provides, in its places; files that pip needs, such as folders of wheels, below /host.
        self.mounts = {Path(path): Path(path) for path in ("/etc/hosts", "/etc/resolv.conf", "/dev", "/proc")}
        for line in options.splitlines():
            name, value = line.split("=", 1)
            words = value.strip("'").split()
            for index, word in enumerate(words):
                path = Path(word.removeprefix("file://"))
                if path.is_absolute() and path.exists():
                    folder = Path(*path.parts[:3])  # an index in a folder may refer to files beside it
                    self.mounts[folder] = Path(f"/host{folder}")
                    words[index] = word.replace(str(path), f"/host{path}")
            self.pip_variables["PIP_" + name.rpartition(".")[2].upper().replace("-", "_")] = " ".join(words)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command in the root directory, with mounts that end with the command."""
        mounts = []
        for path, place in self.mounts.items():
            target = self.path / place.relative_to("/")
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            mounts.append(f"mount --rbind {shlex.quote(str(path))} {shlex.quote(str(target))}")
        in_root = f"cd {shlex.quote(self.directory)} && {command}"
        variables = [f"{name}={value}" for name, value in {**self.pip_variables, **self.environment}.items()]
        chroot = shlex.join(["chroot", str(self.path), "env", "-i", *variables, "sh", "-c", in_root])
        script = " && ".join([*mounts, f"exec {chroot}"])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=STEP_SECONDS
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done

    def follow(self, instruction: str, arguments: str) -> None:
        """Follow an instruction of the Dockerfile."""
        match instruction:
            case "FROM":
                name, _, release = arguments.partition(":")
                assert name == "debian", f"FROM {arguments} cannot be built here"
                suite = release.removesuffix("-slim")
                command = ["mmdebstrap", "--quiet", "--variant=minbase", suite, str(self.path)]
                subprocess.run(command, check=True, timeout=STEP_SECONDS)
            case "RUN":
                self.run(arguments)
            case "ENV":
                name, value = arguments.split("=", 1)
                self.environment[name] = value.replace(f"${name}", self.environment.get(name, ""))
            case "WORKDIR":
                self.directory = arguments
                self.inside(".").mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = arguments.split()
                for source in sources:
                    origin = REPOSITORY / source
                    if origin.is_dir():
                        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                        shutil.copytree(origin, self.inside(target), ignore=ignored)
                    else:
                        shutil.copy(origin, self.inside(target))
            case "ARG" | "CMD":
                pass
            case _:
                raise AssertionError(f"this test cannot follow {instruction}")

    def inside(self, path: str) -> Path:
        """Return where a path of the image is on this machine."""
        return self.path / (Path(self.directory) / path).relative_to("/")


@pytest.mark.timeout(2 * STEP_SECONDS)
def test_dockerfile_builds_image_that_trains(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        pytest.skip("a clean root needs root and mmdebstrap: apt-get install mmdebstrap")
    root = CleanRoot(tmp_path / "root")
    instructions = read_dockerfile()
    try:
        for instruction, arguments in instructions:
            root.follow(instruction, arguments)
        (command,) = (arguments for instruction, arguments in instructions if instruction == "CMD")
        assert "Usage" in root.run(shlex.join(json.loads(command))).stdout
        root.inside("run.toml").write_text(RUN_FILE)
        done = root.run("phalanx train run.toml --nproc 2")
        assert "held-out loss" in done.stdout
        assert "2 ranks" in done.stderr
        assert len(root.inside("runs/image/metrics.jsonl").read_text().splitlines()) >= 2
        assert list(root.path.glob("opt/venv/lib/python3*/site-packages/phalanx-*/licenses/licenses/plotly.js.txt"))
    finally:
        shutil.rmtree(root.path, ignore_errors=True)
