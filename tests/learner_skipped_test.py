"""Tests of updates whose loss or gradient is not finite."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_learner import (
  assert_trees_close,
  make_learner,
  make_rows,
  params,
  step,
)

from gigpo_jax import losses


def test_non_finite_gradient_is_skipped_and_counted():
  subject = make_learner()
  advantages = np.zeros(16, np.float32)
  advantages[0] = np.nan
  state, metrics = step(subject, make_rows(), advantages=advantages)
  assert metrics['update/skipped'] == 1
  assert int(state.updates) == 0
  assert_trees_close(state.params, params(), 0)
  # The skipped update leaves no trace in the accumulator or the moments.
  state, metrics = step(subject, make_rows(), state=state)
  expected, _ = step(make_learner(), make_rows())
  assert metrics['update/skipped'] == 0
  assert int(state.updates) == 1
  assert_trees_close(state.params, expected.params, 0)


def _infinite_loss(outputs, tokens):
  """Returns an infinite loss with finite gradients for marked tokens."""
  marked = tokens.advantages > 1
  return outputs.log_probs + jnp.where(marked, jnp.inf, 0.0), {}


INFINITE_LOSS = losses.FunctionLoss(_infinite_loss)


def test_non_finite_loss_with_finite_gradient_is_skipped():
  subject = make_learner(loss=INFINITE_LOSS)
  advantages = np.zeros(16, np.float32)
  advantages[3] = 2
  state, metrics = step(subject, make_rows(), advantages=advantages)
  assert (metrics['update/skipped'], metrics['update/grad_norm']) == (1, 0)
  assert_trees_close(state.params, params(), 0)
  # The next update is unaffected.
  state, metrics = step(
    subject, make_rows(), state=state, advantages=advantages * 0
  )
  assert metrics['update/skipped'] == 0
  assert metrics['update/grad_norm'] > 0


def test_a_skipped_update_leaves_no_trace_in_the_metrics():
  subject = make_learner(minibatch_rows=4)
  rows = make_rows()
  one, other = subject._minibatches(rows, 0, 0)
  advantages = np.linspace(-1, 1, 16, dtype=np.float32)
  advantages[one[0]] = np.nan
  _, metrics = step(subject, rows, advantages=advantages)
  own = dataclasses.replace(
    rows, groups=np.where(np.isin(np.arange(16), other), rows.groups, -1)
  )
  _, expected = step(subject, own, advantages=advantages)
  assert (metrics['update/count'], metrics['update/skipped']) == (2, 1)
  assert expected['update/skipped'] == 0 < expected['update/tokens']
  for name, value in expected.items():
    if not name.startswith(('packs/', 'update/')):
      assert metrics[name] == pytest.approx(value, rel=1e-6), name
  assert metrics['update/tokens'] == expected['update/tokens']
  # Without another update, they are unknown.
  _, metrics = step(subject, rows, advantages=np.full(16, np.nan, np.float32))
  assert (metrics['update/skipped'], metrics['update/tokens']) == (2, 0)
  for name in ('loss/total', 'loss/entropy', 'ratio/max', 'ratio/kl'):
    assert np.isnan(metrics[name])


def test_consecutive_skipped_updates_are_counted():
  subject = make_learner(
    loss=INFINITE_LOSS, minibatch_rows=2, microbatch_tokens=32
  )
  rows = make_rows()
  order = np.concatenate(subject._minibatches(rows, 0, 0))
  zeros = np.zeros(16, np.float32)
  for positions, before, skipped, in_row, longest in (
    ([0, 1], 0, 1, 0, 1),
    ([0, 7], 0, 2, 1, 1),
    ([0, 2, 4], 0, 3, 0, 3),
    ([0, 2], 3, 2, 0, 5),
    ([0, 4, 6], 0, 3, 2, 2),
    (range(8), 2, 4, 6, 6),
  ):
    advantages = zeros.copy()
    advantages[order[list(positions)]] = 2
    _, metrics = step(
      subject, rows, advantages=advantages, skipped_before=before
    )
    assert metrics['update/count'] == 4
    assert metrics['update/skipped'] == skipped
    assert metrics['update/skipped_in_row'] == in_row
    assert metrics['update/most_skipped_in_row'] == longest
