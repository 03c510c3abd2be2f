# A vLLM server with GPUs that follows a run. Build it from the repository's root:
#
#   docker build -f docker/server.Dockerfile -t vllm-delta-sync/server .
#
# BASE    vLLM's own image, or one made from it: python3, pip and vllm, and the user 2000:0 with a home.
# EXTRAS  which stores it can read: stores is all of them, object-stores leaves the Hub out.
#
# The secret pip_conf is a pip.conf with package indexes of your own (docker/README.md). It leaves nothing in the image.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0
FROM ${BASE}
ARG EXTRAS=stores
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

USER 0:0
WORKDIR /opt/vllm-delta-sync
COPY . .
# The constraints keep every package of the base at the version that its vLLM was built with.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf,required=false \
    python3 -m pip list --format=freeze >/tmp/installed.txt \
    && python3 -m pip install --no-cache-dir --root-user-action=ignore --constraint /tmp/installed.txt ".[${EXTRAS}]" \
    && rm -r /tmp/installed.txt build ./*.egg-info

USER 2000:0
ENV HOME=/home/vllm
WORKDIR /home/vllm
EXPOSE 8000
# Ready is a server that serves a proven version. Loading a large model takes minutes, in which nothing is held against it.
# no_proxy: a proxy that the container's variables name, for the bucket, does not reach this address.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=3 \
    CMD ["env", "no_proxy=*", "python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/delta_sync/ready', timeout=5)"]
ENTRYPOINT ["delta-sync", "serve"]
