# Two images from one file: docker build --target coordinator . / docker build --target silo-agent .
# BASE chooses the Python image; a CUDA build needs a base with CUDA's libraries and TORCH_INDEX of that CUDA version.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /source
RUN python -m venv /opt/lorica
COPY ops/constraints.txt ops/constraints.txt
# torch alone first: the layer is large and changes seldom, and no resolver may pick another build of it.
RUN /opt/lorica/bin/pip install --extra-index-url "${TORCH_INDEX}" -c ops/constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY security security
COPY coordinator coordinator
COPY silo_agent silo_agent
COPY ops ops
RUN /opt/lorica/bin/pip install -c ops/constraints.txt .

FROM ${BASE} AS common
RUN groupadd --gid 10001 lorica \
    && useradd --uid 10001 --gid lorica --home-dir /var/lib/lorica --create-home --shell /usr/sbin/nologin lorica \
    && chmod 0700 /var/lib/lorica
COPY --from=build /opt/lorica /opt/lorica
ENV PATH=/opt/lorica/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/lorica
VOLUME /var/lib/lorica

FROM common AS coordinator
ENV LORICA_COORDINATOR_DIR=/var/lib/lorica/federation
# 7443 silos and operators (mutual TLS), 7444 enrolment (open while an invitation is), 9464 metrics
EXPOSE 7443 7444 9464
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s CMD ["coordinator", "status"]
ENTRYPOINT ["coordinator"]
CMD ["serve"]

FROM common AS silo-agent
ENV LORICA_SILO_DIR=/var/lib/lorica/silo
# An agent dials out and listens nowhere.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["silo-agent", "status"]
ENTRYPOINT ["silo-agent"]
CMD ["start", "--data", "/data"]
