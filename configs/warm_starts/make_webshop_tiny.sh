#!/usr/bin/env bash
# Makes webshop_tiny next to this file: a 0.6M-parameter policy that imitates
# a shopper with random mistakes in the generated shop. Takes about 25 minutes on
# one CPU core, to which it is pinned: the number of threads that share a sum can
# change its last bit. Run from the project's folder. The first argument is the
# folder of the stages.
set -euo pipefail
out=${1:-runs/webshop_warm_start}
sft=(taskset -c 0 python launch/sft.py --config=configs/webshop.py:tiny
  --config.optimizer.b2=0.98 --config.learner.microbatch_tokens=5760)

# New tokenizer and weights.
"${sft[@]}" --workdir="$out/1"

# A second pass, with a shopper that makes fewer mistakes.
"${sft[@]}" --workdir="$out/2" --config.sft.init= --config.seed=1 \
  --config.model.path="$out/1/policy" --config.sft.noise=0.15 \
  --config.sft.learning_rate=2e-3

cp "$out"/2/policy/* configs/warm_starts/webshop_tiny/
