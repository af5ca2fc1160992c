# The server on Ascend 910C: git archive HEAD | docker build -f scripts/deploy/ascend.Dockerfile -t lopa-dist-ascend:ascend -
# The driver stays on the host, and is mounted. CANN, torch and torch_npu go together (docs/ascend.md, Versions). On x86
# torch_npu asks for torch's CPU build: name an index that has it by --build-arg PIP_EXTRA_INDEX_URL=...
ARG CANN_IMAGE=quay.io/ascend/cann:9.1.0-a3-ubuntu22.04-py3.12
FROM ${CANN_IMAGE}

ARG PIP_EXTRA_INDEX_URL
ARG TORCH=2.10.0
ARG TORCH_NPU=2.10.0.post4
ARG RAY=2.60.0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libjemalloc2 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/lopa
RUN pip install "torch==${TORCH}" "torch_npu==${TORCH_NPU}" "ray[serve]==${RAY}"
COPY setup.py pyproject.toml README.md LICENSE ./
COPY lopa_ascend lopa_ascend
COPY scripts scripts
# The self-test takes its cases from here.
COPY tests tests
RUN pip install --editable ".[npu]"

EXPOSE 8000
# The image's own entry point sources CANN's set_env.sh. Root, because the devices belong to it.
CMD ["scripts/launch/node.sh", "--host", "0.0.0.0"]
