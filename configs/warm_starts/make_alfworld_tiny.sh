#!/usr/bin/env bash
# Makes alfworld_tiny next to this file: a 0.6M-parameter policy that
# imitates an expert with random mistakes on generated games. Takes about an hour
# on one CPU core, to which it is pinned: the number of threads that share a sum
# can change its last bit. Run from the project's folder. The first argument is
# the folder of the stages.
set -euo pipefail
out=${1:-runs/warm_start}
sft=(taskset -c 0 python launch/sft.py --config=configs/alfworld.py:tiny
  --config.optimizer.b2=0.98 --config.learner.microbatch_tokens=5760)

# New tokenizer and weights.
"${sft[@]}" --workdir="$out/1"

# A second pass, with an expert that makes fewer mistakes.
"${sft[@]}" --workdir="$out/2" --config.sft.init= --config.seed=1 \
  --config.model.path="$out/1/policy" --config.sft.noise=0.3 \
  --config.sft.learning_rate=2e-3

# A third pass, with an expert that makes a random action half of the time. Its
# action is then predictable only from the list of actions, which a small policy
# learns to read last.
"${sft[@]}" --workdir="$out/3" --config.sft.init= --config.seed=2 \
  --config.model.path="$out/2/policy" --config.sft.noise=0.5 \
  --config.sft.learning_rate=2e-3

cp "$out"/3/policy/* configs/warm_starts/alfworld_tiny/
