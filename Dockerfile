# The sidecar and its embedded store in one image: no root, no shell needed, read-only root file system.
#
#   docker run --read-only -v sidecar-data:/data -v ./config.yaml:/etc/sidecar/config.yaml:ro \
#       -p 127.0.0.1:8025:8025 -p 127.0.0.1:8026:8026 --stop-timeout 70 email-idempotency-sidecar
#
# The configuration comes from outside ($SIDECAR_CONFIG). Its defaults listen on loopback, which inside a container is
# the container alone: right in a pod, whose containers share it; anywhere else write `listen: 0.0.0.0:8025` and
# `admin: {listen: 0.0.0.0:8026, token: ...}`, and publish the ports on loopback only, as above.
# Records live in /data (`store.url: embedded:./data`, the working directory is /). A container whose volume is gone
# has forgotten what it sent: name the volume, or use a shared Redis. A directory of the host's must belong to 10001.
# Stopping takes `drain` and then as long as outstanding requests need (`timeout.total`): hence --stop-timeout, in
# Kubernetes terminationGracePeriodSeconds. What is killed earlier is kept as unknown.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /src
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# The packages change rarely: a layer of their own. Without pip, so that the image holds nothing that installs.
COPY constraints constraints
RUN python -m venv --without-pip /opt/sidecar \
    && pip install --require-hashes --only-binary :all: -r constraints/build.txt \
    && pip --python /opt/sidecar/bin/python install --require-hashes --only-binary :all: -r constraints/runtime.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/sidecar/bin/python install --no-deps --no-index /wheels/*.whl

FROM python:${PYTHON}-slim
ARG VERSION=unknown
LABEL org.opencontainers.image.title="email-idempotency-sidecar" \
      org.opencontainers.image.description="A local reverse proxy that gives any e-mail API idempotency" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /opt/sidecar /opt/sidecar
# A new volume at /data takes its owner from here.
RUN mkdir -p /data /etc/sidecar && chown 10001:10001 /data
ENV PATH=/opt/sidecar/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    SIDECAR_CONFIG=/etc/sidecar/config.yaml
WORKDIR /
USER 10001:10001
VOLUME /data
EXPOSE 8025 8026
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["sidecar", "healthcheck"]
ENTRYPOINT ["sidecar"]
CMD ["serve"]
