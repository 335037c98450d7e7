"""Log-probs of prompts: rows in which prompts are scored like completions.

NumPy only.
"""

import dataclasses

import numpy as np

from gigpo_jax import batch


def make_rows(rows: batch.Rows) -> batch.Rows:
  """Returns rows in which all tokens but the first are the completion."""
  return dataclasses.replace(
    rows,
    prompt_lengths=np.minimum(rows.prompt_lengths, 1),
    sampler_log_probs=np.zeros(
      (len(rows.tokens), rows.tokens.shape[1] - 1), np.float32
    ),
  )


def completions(values: np.ndarray, rows: batch.Rows) -> np.ndarray:
  """Returns the values of completion tokens, [R, C], of those of all tokens.

  Args:
    values: [R, L - 1]; starts with a row's second token.
    rows: the rows.
  """
  columns = np.arange(rows.sampler_log_probs.shape[1])
  positions = rows.prompt_lengths[:, None] - 1 + columns
  positions = np.clip(positions, 0, values.shape[1] - 1)
  taken = np.take_along_axis(values, positions, axis=1)
  return np.where(rows.completion_mask, taken, 0)
