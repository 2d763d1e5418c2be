# docker build -t easel .
# docker build -t easel:cpu --build-arg TORCH_INDEX_URL=<index of torch's CPU wheels> .      several GB smaller, no GPU
# docker run --rm -p 8000:8000 easel                                                         the embedded demo model
# docker run --rm -p 8000:8000 --gpus all -v easel-models:/models easel Qwen/Qwen-Image-2.1

FROM python:3.12.12-slim-bookworm AS build
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docker/install.sh docker/
COPY app app
COPY engine engine
COPY models models
RUN TORCH_INDEX_URL="$TORCH_INDEX_URL" sh docker/install.sh /opt/easel

FROM python:3.12.12-slim-bookworm
# A fixed uid, so that a volume or a folder of the host can be given to it. /models holds what the hub sends.
RUN useradd --uid 10001 --create-home easel && install -d -o easel -g easel /models
COPY --from=build /opt/easel /opt/easel
COPY docker/healthcheck.py /opt/easel/
ENV PATH=/opt/easel/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models EASEL_HOST=0.0.0.0 EASEL_PORT=8000
USER 10001
WORKDIR /home/easel
VOLUME /models
EXPOSE 8000
# Long enough to load a large checkpoint; one that is still being downloaded shows as unhealthy until it is there.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD python /opt/easel/healthcheck.py "http://127.0.0.1:${EASEL_PORT}/health/ready"
ENTRYPOINT ["easel", "serve"]
