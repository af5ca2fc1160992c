# The server on NVIDIA GPUs: git archive HEAD | docker build -f scripts/deploy/cuda.Dockerfile -t lopa-dist-ascend:cuda -
# The driver stays on the host: CUDA 13 needs 580 or newer (docs/cuda.md, Drivers). torch brings the other libraries of CUDA.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${CUDA_IMAGE}

ARG PIP_EXTRA_INDEX_URL
ARG TORCH=2.13.0
ARG RAY=2.60.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Triton compiles a part of itself with gcc and Python.h at the first start; g++ compiles the kernels for CPUs here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

ENV PATH=/opt/venv/bin:${PATH}
WORKDIR /opt/lopa
RUN pip install "torch==${TORCH}" "ray[serve]==${RAY}"
COPY setup.py pyproject.toml README.md LICENSE ./
COPY lopa_ascend lopa_ascend
COPY scripts scripts
# The self-test takes its cases from here.
COPY tests tests
RUN pip install --editable ".[cuda]" \
    && python -m compileall -q lopa_ascend scripts \
    && useradd --uid 1001 lopa

# It writes to /tmp alone: also Triton, and what is downloaded by default.
ENV HOME=/tmp
USER 1001
EXPOSE 8000
CMD ["python", "-m", "lopa_ascend.serve", "--host", "0.0.0.0", "--device", "cuda"]
