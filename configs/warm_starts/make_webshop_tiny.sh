#!/usr/bin/env bash
# Makes webshop_tiny beside this file: a 0.6M-parameter policy that imitates an
# erring shopper in the generated shop. About 25 minutes on one CPU core, to
# which it is bound: how a sum is shared between threads can change its last
# bit. Run from the project's folder; OUT is where the stages go.
set -euo pipefail
out=${1:-runs/webshop_warm_start}
sft=(taskset -c 0 python launch/sft.py --config=configs/webshop.py:tiny
  --config.optimizer.b2=0.98 --config.learner.microbatch_rows=16)

# Tokenizer and weights from nothing.
"${sft[@]}" --workdir="$out/1"

# Once more with a shopper that errs less.
"${sft[@]}" --workdir="$out/2" --config.sft.init= --config.seed=1 \
  --config.model.path="$out/1/policy" --config.sft.noise=0.15 \
  --config.sft.learning_rate=2e-3

cp "$out"/2/policy/* configs/warm_starts/webshop_tiny/
