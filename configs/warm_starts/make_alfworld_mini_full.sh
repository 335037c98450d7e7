#!/usr/bin/env bash
# Makes alfworld_mini_full next to this file: alfworld_tiny after 1,500 episodes
# in full rooms of an expert that makes a random action half of the time. Takes
# 10 minutes on one CPU core, to which it is pinned: the number of threads that
# share a sum can change its last bit. Run from the project's folder. The first
# argument is the folder to which the warm start is written before it is copied.
set -euo pipefail
out=${1:-runs/mini_full_warm_start}
taskset -c 0 python launch/sft.py --config=configs/alfworld.py:mini_full \
  --config.model.path=configs/warm_starts/alfworld_tiny \
  --config.optimizer.b2=0.98 --workdir="$out"
mkdir -p configs/warm_starts/alfworld_mini_full
cp "$out"/policy/* configs/warm_starts/alfworld_mini_full/
