# An image a side: docker build --target coordinator . / docker build --target silo-agent .
# And one to try things with, never for production: --target lab has all three commands.
#
# BASE         the Python image. Pinned by version; by digest it is fixed for good: --build-arg BASE=python@sha256:...
# TORCH_INDEX  where torch comes from: builds for the CPU alone unless you say otherwise. --build-arg TORCH_INDEX=https://pypi.org/simple takes
#              the build for CUDA, which brings CUDA's libraries with it: the same BASE does, the host has driver and container toolkit.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
COPY ops/constraints.txt ops/hashes.txt ops/
# As in the Makefile: everything but torch is held to a hash, torch to its version. What the tools for development need is fetched too,
# since one file has all hashes; the second environment below takes from /wheels what Lorica requires, and nothing from elsewhere.
RUN pip download --quiet --no-deps --only-binary=:all: --require-hashes --dest /wheels -r ops/hashes.txt \
    && pip download --quiet --only-binary=:all: --extra-index-url "${TORCH_INDEX}" -c ops/constraints.txt --dest /wheels torch
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY security security
RUN pip install --quiet --no-index --find-links /wheels -c ops/constraints.txt setuptools

# A side's wheel has its own packages and command: nothing of the other side, of the laboratory, and of what lies beside a wheel.
FROM build AS build-coordinator
COPY coordinator coordinator
RUN sed -i -E '/^(silo-agent|lorica) = "/d; /^\[tool.setuptools.data-files\]/,/^$/d' pyproject.toml \
    && pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/lorica \
    && pip --python /opt/lorica/bin/python install --quiet --no-index --find-links /wheels -c ops/constraints.txt 'lorica[coordinator,postgresql]' \
    && pip --python /opt/lorica/bin/python check

FROM build AS build-silo-agent
COPY silo_agent silo_agent
RUN sed -i -E '/^(coordinator|lorica) = "/d; /^\[tool.setuptools.data-files\]/,/^$/d' pyproject.toml \
    && pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/lorica \
    && pip --python /opt/lorica/bin/python install --quiet --no-index --find-links /wheels -c ops/constraints.txt 'lorica[silo]' \
    && pip --python /opt/lorica/bin/python check

FROM build AS build-lab
COPY coordinator coordinator
COPY silo_agent silo_agent
COPY ops ops
RUN sed -i -E '/^\[tool.setuptools.data-files\]/,/^$/d' pyproject.toml \
    && pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/lorica \
    && pip --python /opt/lorica/bin/python install --quiet --no-index --find-links /wheels -c ops/constraints.txt 'lorica[lab]' \
    && pip --python /opt/lorica/bin/python check

FROM ${BASE} AS common
RUN groupadd --gid 10001 lorica \
    && useradd --uid 10001 --gid lorica --home-dir /var/lib/lorica --create-home --shell /usr/sbin/nologin lorica \
    && chmod 0700 /var/lib/lorica
# Everything that is written goes below /var/lib/lorica, and what does not last to /tmp: the rest may be read-only.
ENV PATH=/opt/lorica/bin:$PATH HOME=/var/lib/lorica PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/lorica
VOLUME /var/lib/lorica

FROM common AS lab
COPY --from=build-lab /opt/lorica /opt/lorica
ENTRYPOINT ["lorica"]

# The health checks look at how old the file is that the event loop touches every ten seconds: no second Python, no port, no key.
FROM common AS coordinator
COPY --from=build-coordinator /opt/lorica /opt/lorica
ENV LORICA_COORDINATOR_DIR=/var/lib/lorica/federation
# 7443 silos and operators (mutual TLS), 7444 enrolment (open while an invitation is), 9464 metrics
EXPOSE 7443 7444 9464
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=2 \
    CMD ["sh", "-c", "test -n \"$(find /var/lib/lorica/federation/coordinator.lock -mmin -1)\""]
ENTRYPOINT ["coordinator"]
CMD ["serve"]

FROM common AS silo-agent
COPY --from=build-silo-agent /opt/lorica /opt/lorica
ENV LORICA_SILO_DIR=/var/lib/lorica/silo
# An agent dials out, and listens nowhere unless its silo.toml says where metrics are served.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=2 \
    CMD ["sh", "-c", "test -n \"$(find /var/lib/lorica/silo/agent.lock -mmin -1)\""]
ENTRYPOINT ["silo-agent"]
CMD ["start", "--data", "/data"]
