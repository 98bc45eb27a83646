# The image of `lockstep serve`: docs/deployment.md says how to build and run it.
#
# BASE_IMAGE must have Python 3.11 or newer with venv, on Debian or a relative. Both stages use the same base, because
# the environment built in the first links to its interpreter. VARIANT is cpu or cuda: the cuda wheels of torch bring
# the CUDA libraries with them, so both variants have the same base and differ in wheels alone.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG VARIANT=cpu
# Where pip finds the CPU build of torch, whose version constraints.txt fixes; on the default index that version is the
# CUDA build. Empty: pip's own configuration knows a place.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# What pip reads from the environment. Nothing of it is in the image: only /opt/venv goes into the second stage.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT PIP_DEFAULT_TIMEOUT
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

SHELL ["/bin/sh", "-eu", "-c"]
WORKDIR /src
COPY deploy/image/requirements.py pyproject.toml constraints.txt ./
# Dependencies first: this layer stays in the cache while only the sources change.
RUN python3 -m venv /opt/venv; \
    python3 requirements.py "${VARIANT}" > requirements.txt; \
    case "${VARIANT}" in \
        cpu) /opt/venv/bin/pip install -c constraints.txt ${TORCH_CPU_INDEX:+--extra-index-url "${TORCH_CPU_INDEX}"} \
                -r requirements.txt ;; \
        cuda) /opt/venv/bin/pip install -c constraints.txt -r requirements.txt ;; \
        *) echo "VARIANT must be cpu or cuda, not ${VARIANT}" >&2; exit 1 ;; \
    esac
COPY README.md LICENSE ./
COPY kernels ./kernels
COPY runtime ./runtime
COPY server ./server
COPY deploy/image/trim.sh ./
RUN /opt/venv/bin/pip install --no-deps .; \
    sh trim.sh /opt/venv "${VARIANT}"; \
    /opt/venv/bin/lockstep --version

FROM ${BASE_IMAGE}
ARG VARIANT=cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="lockstep" \
      org.opencontainers.image.description="OpenAI-compatible serving for hybrid language models, with exact speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      dev.lockstep.variant="${VARIANT}"

SHELL ["/bin/sh", "-eu", "-c"]
# Triton compiles a small C launcher when it first meets a GPU kernel. The CPU variant compiles nothing, ever.
RUN if [ "${VARIANT}" = cuda ]; then \
        apt-get update; \
        apt-get install -y --no-install-recommends gcc libc6-dev; \
        rm -rf /var/lib/apt/lists/*; \
    fi; \
    groupadd --gid 10001 lockstep; \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/lockstep --shell /usr/sbin/nologin lockstep; \
    install -d -o 10001 -g 10001 -m 0750 /var/cache/lockstep
COPY --from=build /opt/venv /opt/venv

# All that is ever written goes below /var/cache/lockstep and /tmp; the rest of the file system may be read-only.
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/lockstep \
    XDG_CACHE_HOME=/var/cache/lockstep \
    TRITON_CACHE_DIR=/var/cache/lockstep/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/lockstep/inductor \
    LOCKSTEP_REVISION=${REVISION} \
    LOCKSTEP_HOST=0.0.0.0 \
    LOCKSTEP_PORT=8000
VOLUME ["/var/cache/lockstep", "/tmp"]
WORKDIR /var/cache/lockstep
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['LOCKSTEP_PORT'] + '/ready', timeout=4)"]
ENTRYPOINT ["lockstep"]
CMD ["serve"]
