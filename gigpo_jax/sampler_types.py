"""Requests to a sampler, its completions and its counters.

`gigpo_jax.sampler` exports all of them.
"""

import dataclasses

import numpy as np

from gigpo_jax import sampling

Sampling = sampling.Sampling


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to complete.

  Attributes:
    prompt_ids: int32 [P], at least one token.
    stream: integers that identify the random stream: (domain, iteration, task,
      member, step).
    sampling: options of sampling.
    max_tokens: maximum length of the completion; None: the sampler's maximum.
  """

  prompt_ids: np.ndarray
  stream: tuple[int, int, int, int, int]
  sampling: Sampling = Sampling()
  max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """A sampled completion.

  Attributes:
    ids: int32 [C]; includes the stop token, if any, as the last.
    log_probs: float32 [C]; log-probability of each token under the full
      distribution at the sampling temperature, before top-k, top-p and min-p.
      The loss uses these. Greedy sampling reports them at temperature 1.
    sampled_log_probs: float32 [C]; log-probability under the truncated
      distribution that was sampled, after top-k, top-p and min-p.
    finish_reason: 'stop', or 'length' at the maximum number of tokens.
  """

  ids: np.ndarray
  log_probs: np.ndarray
  sampled_log_probs: np.ndarray
  finish_reason: str


@dataclasses.dataclass
class Stats:
  """Counters of a sampler since the last `take_stats`.

  Attributes:
    prefill_tokens: prompt tokens prefilled, without padding.
    padded_tokens: prompt tokens prefilled, with padding.
    shared_tokens: prompt tokens that needed no prefill because a slot already
      held their keys and values.
    decode_tokens: tokens sampled.
    slot_steps: decoding steps of one token, summed over all slots, including
      empty slots.
    idle_secs: upper bound of the time that the device was idle while requests
      were in progress.
    spans: (slot, 'prefill' or 'decode', start, end) for a timeline, recorded if
      `load` was called with `trace`; host time in monotonic seconds.
  """

  prefill_tokens: int = 0
  padded_tokens: int = 0
  shared_tokens: int = 0
  decode_tokens: int = 0
  slot_steps: int = 0
  idle_secs: float = 0.0
  spans: list[tuple[int, str, float, float]] = dataclasses.field(
    default_factory=list
  )
