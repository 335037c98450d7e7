#!/usr/bin/env bash
# Makes NAME_SIZE next to this file, a policy that imitates the expert of
# configs/NAME.py:SIZE, for example:
#   configs/warm_starts/make.sh keydoor tiny
# Takes 1 to 12 minutes on one CPU core, to which it is pinned: the number of
# threads that share a sum can change its last bit. Run from the project's folder.
set -euo pipefail
policy=configs/warm_starts/$1_$2
taskset -c 0 python launch/sft.py --config="configs/$1.py:$2" \
  --workdir="runs/$1-$2-sft"
mkdir -p "$policy"
cp "runs/$1-$2-sft"/policy/* "$policy"
