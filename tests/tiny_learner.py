"""A learner of a tiny model and rows for it, for tests of the learner."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import reference

from gigpo_jax import batch, learner, losses, mesh, optimizer
from gigpo_jax.models import qwen

C = 6
CONFIG = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=2,
  head_dim=8,
  dtype='float32',
  remat='none',
)
EXPERTS = dataclasses.replace(
  CONFIG,
  num_experts=4,
  experts_per_token=2,
  intermediate_size=8,
  qkv_bias=False,
  qk_norm=True,
)
LOSS = losses.PolicyGradient(dual_clip=3.0)
ROW_LOSS = dataclasses.replace(LOSS, ratio_level='row')


def make_mesh(data=1, fsdp=1, tensor=1, **axes):
  count = data * fsdp * tensor * math.prod(axes.values())
  return mesh.make_mesh(
    data, fsdp, tensor, devices=jax.devices()[:count], **axes
  )


# Cached, because compilation takes most of the time of a test.
@functools.cache
def make_learner(devices=None, loss=LOSS, config=CONFIG, **kwargs):
  defaults = {
    'optimizer': optimizer.AdamW(1e-3).make(),
    'minibatch_rows': 64,
    'microbatch_tokens': 64,
    'length_buckets': (16,),
    'max_completion_tokens': C,
  }
  return learner.Learner(
    config, devices or make_mesh(), loss=loss, **defaults | kwargs
  )


def params():
  return reference.init(CONFIG, jax.random.key(0))


def make_rows(count=8, *, seed=0, row_multiple=16, longest_prompt=9):
  rng = np.random.default_rng(seed)
  rows = batch.pack(
    [
      rng.integers(32, size=rng.integers(2, longest_prompt))
      for _ in range(count)
    ],
    [rng.integers(32, size=rng.integers(1, C + 1)) for _ in range(count)],
    max_prompt_tokens=10,
    max_completion_tokens=C,
    row_multiple=row_multiple,
  )
  noise = rng.normal(size=rows.sampler_log_probs.shape)
  return dataclasses.replace(
    rows,
    sampler_log_probs=np.where(
      rows.completion_mask, -3.4 + 0.3 * noise, 0
    ).astype(np.float32),
  )


def step(subject, rows, *, state=None, iteration=0, advantages=None, **more):
  """Runs one update with the sampler's log-probs; deterministic."""
  if state is None:
    state = subject.init(params())
  if advantages is None:
    advantages = np.linspace(-1, 1, len(rows.groups), dtype=np.float32)
  columns = {
    'advantages': advantages,
    'old_log_probs': rows.sampler_log_probs,
    'ref_log_probs': rows.sampler_log_probs - 0.1 * rows.completion_mask,
    'importance': 1.0,
  }
  return subject.update(
    state,
    rows,
    iteration=iteration,
    **{name: columns[name] for name in subject.columns},
    **more,
  )


def assert_trees_close(a, b, atol):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b
  )


# Adam's first step divides a gradient by its own size, which magnifies rounding
# errors of gradients near 0. Plain SGD shows the gradient itself.
SGD = optax.sgd(1.0)
sgd = functools.partial(make_learner, optimizer=SGD)


def start(subject, config):
  return subject.init(reference.init(config, jax.random.key(0)))
