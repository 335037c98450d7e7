#!/usr/bin/env bash
# Makes alfworld_tiny_planner next to this file: alfworld_tiny after 400
# episodes of the expert as planner and actor. Pinned to one CPU core: the
# number of threads that share a sum can change its last bit. Run from the
# project's folder. The first argument is the folder to which the warm start is
# written before it is copied.
set -euo pipefail
out=${1:-runs/planner_warm_start}
taskset -c 0 python launch/sft.py --config=configs/alfworld.py:tiny,planner \
  --config.model.path=configs/warm_starts/alfworld_tiny \
  --config.optimizer.b2=0.98 --config.sft.report_rows=800 --workdir="$out"
mkdir -p configs/warm_starts/alfworld_tiny_planner
cp "$out"/policy/* configs/warm_starts/alfworld_tiny_planner/
