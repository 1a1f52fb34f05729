# One image for all commands of podgpu, for amd64 and arm64. Builds are reproducible:
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) \
#     --output type=image,name=REGISTRY/podgpu:0.1.0,push=true,rewrite-timestamp=true .
#
# Runs like dcgm-exporter's image: docker run --gpus all --net host IMAGE -f /etc/dcgm-exporter/dcp-metrics-included.csv
ARG PYTHON_IMAGE=docker.io/library/python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM ${PYTHON_IMAGE} AS build
# Zip files cannot store times before 1980.
ARG SOURCE_DATE_EPOCH=315532800
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PYTHONHASHSEED=0 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY deploy/docker/ /docker/
RUN python -m pip install --quiet --require-hashes --requirement /docker/build-requirements.txt
WORKDIR /src
# LICENSE*: a copy without the file builds, too.
COPY pyproject.toml README.md LICENSE* ./
COPY src/ src/
RUN sh /docker/install.sh /src /opt/podgpu /docker/requirements.txt

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="podgpu" \
      org.opencontainers.image.description="Which pod uses which GPU, how much of it, and what that costs" \
      org.opencontainers.image.licenses="Apache-2.0"
# The base image has no .pyc files of the standard library, and a pip that is not needed.
RUN python -m pip uninstall --yes --quiet --root-user-action ignore pip \
    && python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/(site-packages|lib2to3|idlelib|test)/' /usr/local/lib/python3.12
COPY --from=build /opt/podgpu /opt/podgpu
# NVIDIA's paths, so that -f and DCGM_EXPORTER_COLLECTORS of a dcgm-exporter work.
COPY src/podgpu/metrics/counters/*.csv /etc/dcgm-exporter/
ENV PATH=/opt/podgpu/bin:${PATH} PYTHONDONTWRITEBYTECODE=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility
EXPOSE 9400 9401
# Only root can read the kubelet's socket, and DaemonSets of dcgm-exporter set no user. Without pod mapping, --user 65534
# works. No capability is needed.
USER 0:0
ENTRYPOINT ["podgpu", "exporter"]
