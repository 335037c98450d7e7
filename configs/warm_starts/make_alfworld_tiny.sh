#!/usr/bin/env bash
# Makes alfworld_tiny beside this file: a 0.6M-parameter policy that imitates
# an erring expert on generated games. About an hour on one CPU core, to
# which it is bound: how a sum is shared between threads can change its last
# bit. Run from the project's folder; OUT is where the stages go.
set -euo pipefail
out=${1:-runs/warm_start}
sft=(taskset -c 0 python launch/sft.py --config=configs/alfworld.py:tiny
  --config.optimizer.b2=0.98 --config.learner.microbatch_rows=16)

# Tokenizer and weights from nothing.
"${sft[@]}" --workdir="$out/1"

# Once more over the games with an expert that errs a little less.
"${sft[@]}" --workdir="$out/2" --config.sft.init= --config.seed=1 \
  --config.model.path="$out/1/policy" --config.sft.noise=0.3 \
  --config.sft.learning_rate=2e-3

# And with one that errs half the time: what it does can only be read off the
# list of actions, and how to read it is what a small policy learns last.
"${sft[@]}" --workdir="$out/3" --config.sft.init= --config.seed=2 \
  --config.model.path="$out/2/policy" --config.sft.noise=0.5 \
  --config.sft.learning_rate=2e-3

cp "$out"/3/policy/* configs/warm_starts/alfworld_tiny/
