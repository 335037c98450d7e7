"""Requests to a sampler, its completions and its counters.

`gigpo_jax.sampler` exports all of them.
"""

import dataclasses
from collections.abc import Callable, Hashable

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
    conversation: id of the conversation whose next turn this is; the slot keeps
      its keys and values until `Sampler.end_conversation`. None: it has none.
    agent: index of the agent's adapter; 0 if one adapter, or none, is for all.
    text: ids of earlier responses that drafts come from, see `drafts.Texts`;
      does not change what is sampled.
  """

  prompt_ids: np.ndarray
  stream: tuple[int, int, int, int, int]
  sampling: Sampling = Sampling()
  max_tokens: int | None = None
  conversation: Hashable | None = None
  agent: int = 0
  text: np.ndarray = dataclasses.field(
    default_factory=lambda: np.zeros(0, np.int32)
  )


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


@dataclasses.dataclass(eq=False)
class Entry:
  """A request that waits or has a slot.

  Attributes:
    request_id: the caller's id of it; None for a request of another process.
    request: the request.
    limit: maximum number of tokens.
    conversation: id of its conversation, unless it has ended.
    is_new: whether no step has decoded it yet.
    outputs: ids, log-probs and sampled log-probs of each step so far.
  """

  request_id: int | None
  request: Request
  limit: int
  conversation: Hashable | None
  is_new: bool = True
  outputs: list[tuple[np.ndarray, ...]] = dataclasses.field(
    default_factory=list
  )

  def completion(
    self,
    count: int,
    active: bool,
    stop_ids: frozenset[int],
    find_stop: Callable[[np.ndarray, int], int | None] | None,
  ) -> Completion | None:
    """Returns the completion, or None if it is not finished.

    Args:
      count: number of new tokens.
      active: whether it has no stop token and is below its limit.
      stop_ids: tokens that end a completion.
      find_stop: see `sampler.Sampler`.
    """
    keep = None
    if find_stop is not None:
      ids = np.concatenate([output[0] for output in self.outputs])
      keep = find_stop(ids, count)
    if active and keep is None:
      return None
    ids, log_probs, sampled = (
      np.concatenate(arrays)[:keep]
      for arrays in zip(*self.outputs, strict=True)
    )
    stopped = keep is not None or int(ids[-1]) in stop_ids
    return Completion(ids, log_probs, sampled, 'stop' if stopped else 'length')


@dataclasses.dataclass
class Stats:
  """Counters of a sampler since the last `take_stats`.

  Attributes:
    prefill_tokens: prompt tokens prefilled, without padding.
    padded_tokens: prompt tokens prefilled, with padding.
    reused_tokens: prompt tokens that needed no prefill because a row already
      held their keys and values.
    decode_tokens: tokens sampled.
    slot_steps: decoding passes, summed over all slots, including empty slots.
    active_steps: those that sampled tokens: one, or more with a draft.
    idle_secs: upper bound of the time that the device was idle while requests
      were in progress.
    spans: (slot, 'prefill' or 'decode', start, end) for a timeline, recorded if
      `load` was called with `trace`; host time in monotonic seconds.
  """

  prefill_tokens: int = 0
  padded_tokens: int = 0
  reused_tokens: int = 0
  decode_tokens: int = 0
  slot_steps: int = 0
  active_steps: int = 0
  idle_secs: float = 0.0
  spans: list[tuple[int, str, float, float]] = dataclasses.field(
    default_factory=list
  )

  def __add__(self, other: 'Stats') -> 'Stats':
    """Returns the statistics of two parts of a rollout."""
    own, added = vars(self), vars(other)
    return Stats(**{name: own[name] + added[name] for name in own})
