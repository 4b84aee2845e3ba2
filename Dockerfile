# One image for bridge, extender and node agent. Build: docker build -t slurmbridge .
# Slurm's commands come from Debian and must not be newer than your slurmctld, nor more than two
# releases older: choose the Debian release by SUITE, or build FROM your own image with your Slurm.
ARG SUITE=bookworm
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-${SUITE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY slurmbridge slurmbridge
COPY extender extender
# [nvidia]: the node agent asks NVIDIA's driver (`node.devices: nvml`); one pure Python file.
RUN python -m pip wheel --no-cache-dir --constraint constraints.txt --wheel-dir /wheels '.[nvidia]'

FROM python:${PYTHON}-slim-${SUITE}
ARG UID=64030
# slurm-client: salloc, sbatch, scancel, scontrol, squeue. munge: the sidecar of the bridge pod
# (manifests/base/bridge.yaml), which proves to slurmctld who asks.
RUN apt-get update \
 && apt-get install -y --no-install-recommends slurm-client munge \
 && rm -rf /var/lib/apt/lists/* /etc/munge \
 && (id slurm >/dev/null 2>&1 || useradd --system --uid ${UID} --no-create-home --shell /usr/sbin/nologin slurm)
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-cache-dir --no-index --find-links /wheels 'slurmbridge[nvidia]' && rm -rf /wheels
# An environment variable that names a NetworkX backend which is not installed breaks its import.
ENV NETWORKX_AUTOMATIC_BACKENDS= NETWORKX_BACKEND_PRIORITY= PYTHONUNBUFFERED=1
USER slurm
ENTRYPOINT ["slurmbridge"]
CMD ["run", "--config", "/etc/slurmbridge/config.yaml"]
