# docker build -t easel .
# docker build -t easel:cpu --build-arg TORCH_INDEX_URL=<index of torch's CPU wheels> .      several GB smaller, no GPU
# docker run --rm -p 8000:8000 easel                                                         the embedded demo model
# docker run --rm -p 8000:8000 --gpus all -v easel-models:/models easel Qwen/Qwen-Image-2.1

# What is locked, in a layer that a change of the code leaves alone.
FROM python:3.12.12-slim-bookworm AS dependencies
ARG TORCH_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY docker/install.sh docker/requirements.txt docker/torch-cpu.txt docker/
RUN --mount=type=cache,target=/root/.cache/pip TORCH_INDEX_URL="$TORCH_INDEX_URL" sh docker/install.sh /opt/easel

# The project itself, built by the locked setuptools: without isolation pip fetches nothing.
FROM dependencies AS build
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY engine engine
COPY models models
RUN /opt/easel/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels .

FROM python:3.12.12-slim-bookworm
ARG TORCH_INDEX_URL=""
# Triton compiles what starts its kernels with a C compiler; the CPU image has no kernels.
RUN if [ -z "$TORCH_INDEX_URL" ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# A fixed uid, so that a volume or a folder of the host can be given to it. /models holds what the hub sends.
RUN useradd --uid 10001 --create-home easel && install -d -o easel -g easel /models
COPY --from=dependencies /opt/easel /opt/easel
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    /opt/easel/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
COPY docker/healthcheck.py /opt/easel/
# /tmp and /models are all that is written to; kernels are loaded from /tmp, so it must not be mounted noexec on a GPU.
ENV PATH=/opt/easel/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models TRITON_CACHE_DIR=/tmp/triton \
    EASEL_HOST=0.0.0.0 EASEL_PORT=8000
USER 10001
WORKDIR /home/easel
VOLUME /models
EXPOSE 8000
# Long enough to load a large checkpoint; one that is still being downloaded shows as unhealthy until it is there.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD python /opt/easel/healthcheck.py "http://127.0.0.1:${EASEL_PORT}/health/ready"
ENTRYPOINT ["easel", "serve"]
