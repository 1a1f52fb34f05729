# One image for the exporter, cluster, top, doctor, hook, enrich and migrate commands, for amd64 and arm64:
#
#   docker buildx build --platform linux/amd64,linux/arm64 --tag REGISTRY/podgpu:VERSION --push .
#
# `podgpu autoscale` and `podgpu demo` need gRPC: add --build-arg VARIANT=autoscale and the tag VERSION-autoscale.
# `make release` builds the same images without Docker (release/).
#
# Runs like dcgm-exporter's image: docker run --gpus all --net host IMAGE -f /etc/dcgm-exporter/dcp-metrics-included.csv
FROM --platform=$BUILDPLATFORM docker.io/library/debian:bookworm-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 python3-pip
WORKDIR /source
COPY . .
ARG TARGETARCH VARIANT=
# Zip files cannot store times before 1980.
ARG SOURCE_DATE_EPOCH=315532800
RUN SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} python3 -m release.rootfs ${TARGETARCH} /rootfs --variant "${VARIANT}"

FROM scratch
COPY --from=build /rootfs/ /
LABEL org.opencontainers.image.title="podgpu" \
      org.opencontainers.image.description="Which pod uses which GPU, how much of it, and what that costs" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=utility
EXPOSE 9400 9401
# Only root can read the kubelet's socket, and DaemonSets of dcgm-exporter set no user. Without pod mapping, --user 65534
# works. No capability is needed.
USER 0:0
ENTRYPOINT ["podgpu", "exporter"]
