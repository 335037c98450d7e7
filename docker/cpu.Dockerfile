# gigpo_jax on a CPU. Build from the project's root:
#
#   docker build -f docker/cpu.Dockerfile -t gigpo_jax:cpu .
#   docker run --rm -v "$PWD/runs:/workspace/runs" gigpo_jax:cpu \
#     python launch/train.py --config=configs/alfworld.py:mini
FROM python:3.11-slim

# ALFWorld's engine (Fast Downward, textworld) is compiled on installation.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends build-essential git \
  && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY . .
RUN pip install --no-cache-dir -e '.[alfworld]'

CMD ["python", "launch/train.py", "--help"]
