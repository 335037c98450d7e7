"""Tests of the sums over the updates of an iteration."""

import jax.numpy as jnp
import numpy as np

from gigpo_jax.programs import update_sums

NAMES = ('loss/total', 'ratio/max', 'update/tokens')
MASK = jnp.array([True, True, False])


def _add(sums, values):
  values = jnp.array(values)
  total = jnp.sum(jnp.where(MASK, values, 0))
  return sums.add({'loss/total': values, 'ratio/max': values}, MASK, total)


def _zeros(**kwargs):
  names = (*NAMES, 'teacher/loss', 'teacher/tokens')
  return update_sums.zeros(
    names, **({'skipped': jnp.float32(0), 'step_scale': None} | kwargs)
  )


def test_means_are_over_the_tokens_of_updates_that_were_applied():
  sums = _zeros(skipped=jnp.float32(2))
  sums = _add(sums, [1.0, -4.0, 99.0])
  sums = _add(sums, [2.0, 3.0, 99.0])
  assert float(sums.objective) == 2
  sums = sums.end_update(jnp.array(True), jnp.float32(0.5))
  assert float(sums.objective) == 0
  sums = _add(sums, [50.0, np.nan, 0.0])
  sums = sums.end_update(jnp.array(False), jnp.float32(np.inf))
  assert sums.metrics(2) == {
    'loss/total': (1 - 4 + 2 + 3) / 4,
    'ratio/max': 3.0,
    'teacher/loss': 0.0,
    'teacher/tokens': 0.0,
    'update/count': 2.0,
    'update/grad_norm': 0.5,
    'update/most_skipped_in_row': 1.0,
    'update/skipped': 1.0,
    'update/skipped_in_row': 1.0,
    'update/tokens': 4.0,
  }


def test_skipped_updates_in_a_row_continue_those_of_the_last_iteration():
  sums = _zeros(skipped=jnp.float32(2))
  for applied in (False, True, False):
    sums = sums.end_update(jnp.array(applied), jnp.float32(1))
  metrics = sums.metrics(3)
  assert metrics['update/most_skipped_in_row'] == 3
  assert metrics['update/skipped_in_row'] == 1
  for name in ('loss/total', 'ratio/max', 'teacher/loss'):
    assert np.isnan(metrics[name])


def test_as_many_skipped_updates_as_the_limit_are_a_problem():
  metrics = {'critic/most_skipped_in_row': 2.0}
  assert update_sums.skipped_problem(metrics, 3, 'critic') == ''
  assert update_sums.skipped_problem(metrics, 2, 'critic').startswith(
    'learner.max_skipped_in_row=2: the loss or gradient of 2 successive updates'
  )


def test_tokens_of_a_teacher_have_their_own_mean():
  sums = _zeros().add(
    {'teacher/loss': jnp.array([3.0, 5.0, 99.0])},
    MASK,
    jnp.float32(8),
    count='teacher/tokens',
  )
  sums = sums.end_update(jnp.array(True), jnp.float32(1))
  metrics = sums.metrics(1)
  assert (metrics['teacher/loss'], metrics['teacher/tokens']) == (4, 2)
  # No other token was trained, so that there are no means.
  assert metrics['update/tokens'] == 0 and 'loss/total' not in metrics
