#!/usr/bin/env bash
# Makes gymnasium_tiny next to this file: a 0.6M-parameter policy that has
# learned the form of a response from random walks over FrozenLake. Takes about a
# minute on one CPU core, to which it is pinned: the number of threads that share
# a sum can change its last bit. Run from the project's folder. The first argument
# is the folder to which the warm start is written before it is copied.
set -euo pipefail
out=${1:-runs/gymnasium_warm_start}
taskset -c 0 python launch/sft.py --config=configs/gymnasium.py:tiny \
  --workdir="$out"
mkdir -p configs/warm_starts/gymnasium_tiny
cp "$out"/policy/* configs/warm_starts/gymnasium_tiny/
