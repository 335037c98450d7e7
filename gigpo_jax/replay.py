"""Steps of recorded episodes with their stored log-probs and advantages."""

import ml_collections
import numpy as np

from gigpo_jax import batch, sft, teacher, tokenizer


def make_rows(
  config: ml_collections.ConfigDict, text: tokenizer.Tokenizer
) -> tuple[batch.Rows, dict[str, np.ndarray]]:
  """Returns the steps of `sft.data` that have an advantage, and their columns.

  The old log-probs are those of the policy that sampled the tokens, so that the
  ratios of the surrogate are importance ratios. Advantages are those of the
  update that the recorded run made; of one per token, the mean over the row.

  Raises:
    ValueError: in one line, if there is no such step, or the tokens are from
      another tokenizer or exceed the token limits.
  """
  kept = sft.open_episodes(config)
  recorded = sft.recorded_steps(config, text, kept)
  steps = [step for step in recorded if np.isfinite(step['advantage'])]
  if not steps:
    raise ValueError(
      f'sft.data={config.sft.data}: none of {len(recorded)} steps has an '
      'advantage; must be episodes that launch/train.py has trained on'
    )
  rows = sft.pack_steps(config, steps)
  advantages = np.zeros(len(rows.groups), np.float32)
  for r, step in enumerate(steps):
    rows.sampler_log_probs[r, : len(step['log_probs'])] = step['log_probs']
    advantages[r] = step['advantage']
  return rows, teacher.surrogate_columns(advantages, rows.sampler_log_probs)
