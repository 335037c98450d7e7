# gigpo_jax on NVIDIA GPUs. The CUDA libraries come with jax's wheels; the host
# needs the driver and the NVIDIA container toolkit. Build from the root:
#
#   docker build -f docker/cuda.Dockerfile -t gigpo_jax:cuda .
#   docker run --rm --gpus all --shm-size=8g \
#     -v "$PWD/runs:/workspace/runs" -v "$HOME/.cache:/root/.cache" \
#     gigpo_jax:cuda python launch/train.py --config=configs/alfworld.py:mini
FROM python:3.11-slim

# ALFWorld's engine (Fast Downward, textworld) is compiled on installation.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends build-essential git \
  && rm -rf /var/lib/apt/lists/*

ENV NVIDIA_VISIBLE_DEVICES=all \
  NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /workspace
COPY . .
RUN pip install --no-cache-dir -e '.[alfworld,cuda]'

CMD ["python", "launch/train.py", "--help"]
