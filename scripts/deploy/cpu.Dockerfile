# The server on CPUs: git archive HEAD | docker build -f scripts/deploy/cpu.Dockerfile -t lopa-dist-ascend:cpu -
# On x86 PyPI's torch brings CUDA; --build-arg PIP_EXTRA_INDEX_URL=... names an index that has torch's CPU build.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE}

ARG PIP_EXTRA_INDEX_URL
ARG TORCH=2.13.0
ARG RAY=2.60.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# g++ compiles the kernels here, and graphs at start with --graph-mode inductor.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lopa
RUN pip install "torch==${TORCH}" "ray[serve]==${RAY}"
COPY setup.py pyproject.toml README.md LICENSE ./
COPY lopa_ascend lopa_ascend
COPY scripts scripts
RUN pip install --editable . \
    && python -m compileall -q lopa_ascend scripts \
    && useradd --uid 1000 lopa

# It writes to /tmp alone: also Ray, and what is downloaded by default.
ENV HOME=/tmp
USER 1000
EXPOSE 8000
CMD ["python", "-m", "lopa_ascend.serve", "--host", "0.0.0.0"]
