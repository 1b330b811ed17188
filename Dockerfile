# Image for training: docker build -t phalanx .
# PyTorch is the build that pip finds: on PyPI, that for NVIDIA GPUs. For another version of CUDA, or for CPUs only:
# docker build --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu -t phalanx .
FROM debian:bookworm-slim

# PyTorch and Triton compile with g++ and Python's headers (training.compile).
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/phalanx
COPY pyproject.toml README.md LICENSE ./
COPY licenses licenses
COPY src src
RUN pip install --no-cache-dir '.[train,gpu]'

# Volumes of jobs are mounted here (phalanx launch).
WORKDIR /work
CMD ["phalanx", "--help"]
