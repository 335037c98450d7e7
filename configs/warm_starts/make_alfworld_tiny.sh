#!/usr/bin/env bash
# Makes alfworld_tiny beside this file: a 0.5M-parameter policy that imitates
# an erring expert on generated games. About 20 minutes on two CPU cores.
# Run from the project's folder; OUT is where the two stages go.
set -euo pipefail
out=${1:-runs/warm_start}
sft=(python launch/sft.py --config=configs/alfworld.py:tiny)

# Tokenizer and weights from nothing, on larger games and a noisier expert.
"${sft[@]}" --workdir="$out/1" --config.sft.noise=0.35 \
  --config.sft.decay=False --config.env.max_steps=20 \
  --config.env.generator.receptacles='(4,7)' \
  --config.env.generator.distractors='(3,8)'

# One more pass over other episodes, the learning rate falling to zero.
"${sft[@]}" --workdir="$out/2" --config.sft.init= --config.seed=1 \
  --config.model.path="$out/1/policy" --config.sft.epochs=1 \
  --config.sft.learning_rate=1e-3 --config.sft.noise=0.25 \
  --config.env.max_steps=20 \
  --config.env.generator.receptacles='(4,7)' \
  --config.env.generator.distractors='(3,8)'

cp "$out"/2/policy/* configs/warm_starts/alfworld_tiny/
