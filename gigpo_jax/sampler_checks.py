"""Checks of the arguments of a sampler, and of its requests."""

from collections.abc import Sequence

import numpy as np

from gigpo_jax import options, sampler_types
from gigpo_jax.models import layer_runs, qwen
from gigpo_jax.programs import sampler_programs


def check_sizes(
  config: qwen.QwenConfig,
  prompt_buckets: Sequence[int],
  batch_buckets: Sequence[int],
  vocab_size: int,
) -> None:
  """Raises ValueError, in one line, for sizes that a sampler cannot have."""
  if all(run.config.delta for run in layer_runs.runs(config)):
    raise ValueError(
      'config: no layer has attention; the sampler needs one that has'
    )
  for name, sizes in (
    ('prompt_buckets', prompt_buckets),
    ('batch_buckets', batch_buckets),
  ):
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
      raise ValueError(
        f'rollout.{name}={tuple(sizes)}: must be ascending and positive'
      )
  if not 0 < vocab_size <= config.vocab_size:
    raise ValueError(
      f'vocab_size={vocab_size}: the model embeds {config.vocab_size} '
      f'tokens; must be between 1 and {config.vocab_size}'
    )


def check_adapters(agents: Sequence[str], weights: str) -> None:
  """Raises ValueError, in one line, if agents' adapters would be merged."""
  if agents and weights != 'adapters':
    raise ValueError(
      f'rollout.weights={weights}: one matrix cannot hold the adapters of '
      f'lora.agents={agents}; must be adapters'
    )


def check_counts(*, least: int, **counts: int) -> None:
  """Raises ValueError, in one line, for a count outside of [least, 2^31)."""
  for name, count in counts.items():
    if not least <= count <= options.MAX_INT:
      raise ValueError(f'{name}={count}: must be between {least} and 2^31 - 1')


def check_shards(batch_buckets: Sequence[int], shards: int) -> None:
  """Raises ValueError, in one line, if shards cannot share the slots."""
  if any(size % shards for size in batch_buckets):
    raise ValueError(
      f'rollout.batch_buckets={tuple(batch_buckets)}: {shards} copies of '
      f'the model share the slots; must be multiples of {shards}'
    )


def check_request(
  request: sampler_types.Request, config: qwen.QwenConfig, max_prompt: int
) -> None:
  """Raises ValueError, in one line, for a prompt or a stream that is unusable.

  Args:
    request: the request.
    config: shape of the model.
    max_prompt: maximum number of tokens of a prompt.
  """
  ids = np.asarray(request.prompt_ids)
  length = len(ids)
  if ids.ndim != 1 or (length and ids.dtype.kind not in 'iu'):
    raise ValueError(
      f'prompt_ids: of shape {ids.shape} and type {ids.dtype}; must be a list '
      'of integers'
    )
  if length < 1:
    raise ValueError('a prompt has 0 tokens; must have at least 1')
  if length > max_prompt:
    raise ValueError(
      f'a prompt has {length} tokens; at most {max_prompt} '
      'are accepted (the last of rollout.prompt_buckets)'
    )
  if ids.min() < 0 or ids.max() >= config.vocab_size:
    raise ValueError(
      f'prompt_ids: from {ids.min()} to {ids.max()}; must be between 0 and '
      f'{config.vocab_size - 1}, the tokens of the model'
    )
  stream, size = request.stream, sampler_programs.STREAM_SIZE
  if len(stream) != size or min(stream) < 0 or max(stream) > options.MAX_INT:
    raise ValueError(
      f'stream={stream}: must be {size} integers between 0 and 2^31 - 1'
    )
  agents = config.adapters.agents if config.adapters else ()
  if not 0 <= request.agent < max(len(agents), 1):
    raise ValueError(
      f'agent={request.agent}: must be the index of one of the agents '
      f'{agents}, or 0'
    )
