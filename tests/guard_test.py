"""Tests of the guards against collapse."""

import dataclasses
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_learner import make_learner, make_rows, params, step

from gigpo_jax import checkpoint, guard
from gigpo_jax.run import rollback, run_state

HEALTHY = {
  'ratio/kl': 1e-4,
  'train/invalid_action_rate': 0.01,
  'loss/entropy': 0.1,
  'train/response_tokens': 20.0,
}


def started(subject: guard.Guard) -> guard.GuardState:
  """Returns the state after the first iterations: entropy .2, .1, .3."""
  state = guard.GuardState()
  for entropy in (0.2, 0.1, 0.3):
    values = HEALTHY | {'loss/entropy': entropy}
    state, alarms = subject.check(state, values)
    assert not alarms
  return state


@pytest.mark.parametrize(
  ('changes', 'alarm'),
  [
    ({}, ''),
    ({'ratio/kl': 0.06}, 'ratio/kl=0.06: above guard.max_kl=0.05'),
    (
      {'train/invalid_action_rate': 0.5},
      'train/invalid_action_rate=0.5: above guard.max_invalid_rate=0.4',
    ),
    # The mean entropy of the first iterations is .2.
    ({'loss/entropy': 0.0101}, ''),
    (
      {'loss/entropy': 0.0099},
      'loss/entropy=0.0099: below guard.min_entropy=0.05 of 0.2 at the start',
    ),
    ({'loss/entropy': 0.399}, ''),
    (
      {'loss/entropy': 0.41},
      'loss/entropy=0.41: above guard.max_entropy=2 of 0.2 at the start',
    ),
    (
      {'train/response_tokens': 31.0},
      'train/response_tokens=31: above guard.max_response=1.5 of 20 at the '
      'start',
    ),
    ({'ratio/kl': math.nan}, 'ratio/kl=nan: above guard.max_kl=0.05'),
    (
      {'filter/fisher_mean': 0.003},
      'filter/fisher_mean=0.003: above guard.max_fisher=0.002',
    ),
  ],
)
def test_alarms(changes, alarm):
  subject = guard.Guard(max_fisher=0.002)
  state = started(subject)
  same, alarms = subject.check(state, HEALTHY | changes)
  assert alarms == ([alarm] if alarm else [])
  assert same == state
  assert subject.metrics(same, alarms) == ({'guard/alarms': 1} if alarm else {})


def test_levels_of_0_are_off():
  names = ('max_kl', 'max_invalid_rate', 'max_response')
  names += ('min_entropy', 'max_entropy')
  subject = guard.Guard(**dict.fromkeys(names, 0.0))
  state = started(subject)
  for factor in (1e-9, 1e9):
    assert not subject.check(
      state, {k: v * factor for k, v in HEALTHY.items()}
    )[1]


def test_a_shorter_start_keeps_the_alarms():
  state = started(guard.Guard())
  subject = guard.Guard(start_iterations=2)
  _, alarms = subject.check(state, HEALTHY | {'loss/entropy': 9.0})
  assert len(alarms) == 1


def test_an_iteration_without_update_raises_no_alarm():
  subject = guard.Guard()
  assert subject.check(guard.GuardState(), {'train/success_rate': 0.0}) == (
    guard.GuardState(),
    [],
  )


def test_shrinking_is_cumulative_and_survives_a_checkpoint():
  subject = guard.Guard(action='shrink', shrink_factor=0.5)
  state = started(subject)
  bad = HEALTHY | {'ratio/kl': 1.0}
  for scale in (0.5, 0.25):
    state, alarms = subject.check(state, bad)
    assert subject.metrics(state, alarms) == {
      'guard/alarms': 1,
      'guard/step_scale': scale,
    }
  state, alarms = subject.check(state, HEALTHY)
  assert subject.metrics(state, alarms) == {'guard/step_scale': 0.25}
  history = run_state.History(iteration=4, guard_state=state)
  stored = json.loads(json.dumps(history.to_json()))
  assert run_state.History.from_json(stored, 4).guard_state == state
  # A checkpoint of an older release has no guards.
  del stored['guard']
  assert (
    run_state.History.from_json(stored, 4).guard_state == guard.GuardState()
  )


def test_a_resumed_run_that_only_warns_has_updates_of_full_size():
  state = guard.GuardState(step_scale=0.25)
  for action, scale in (('warn', 1), ('shrink', 0.25), ('rollback', 0.25)):
    parts = types.SimpleNamespace(
      guard=guard.Guard(action=action),
      critic=None,
      config=types.SimpleNamespace(checkpoint=types.SimpleNamespace(every=9)),
    )
    assert parts.guard.step_scale(state) == scale
    history = run_state.History(iteration=4, guard_state=state)
    _, history, metrics = rollback.check_alarms(
      parts, None, 'state', history, HEALTHY
    )
    assert metrics.get('guard/step_scale', 1) == scale
    # Another action may follow.
    assert history.guard_state.step_scale == 0.25


def test_alarms_are_printed_and_kept(capsys):
  parts = types.SimpleNamespace(
    guard=guard.Guard(action='shrink', max_kl=1e-5), critic=None
  )
  state, history, metrics = rollback.check_alarms(
    parts, None, 'state', run_state.History(), HEALTHY
  )
  assert state == 'state'
  assert metrics == {'guard/alarms': 1, 'guard/step_scale': 0.5}
  assert history.guard_state.step_scale == 0.5
  assert capsys.readouterr().out.splitlines() == [
    'alarm: ratio/kl=0.0001: above guard.max_kl=1e-05',
    'later updates have 0.5 of their size',
  ]


def test_alarms_only_warn_while_the_critic_alone_is_trained():
  parts = types.SimpleNamespace(
    guard=guard.Guard(action='shrink', max_kl=1e-5),
    critic='a critic',
    config=types.SimpleNamespace(
      critic=types.SimpleNamespace(warmup_iterations=2)
    ),
  )
  scales = []
  for iteration in range(4):
    _, history, metrics = rollback.check_alarms(
      parts, None, 'state', run_state.History(iteration=iteration), HEALTHY
    )
    assert metrics['guard/alarms'] == 1
    scales.append(history.guard_state.step_scale)
  assert scales == [1, 1, 0.5, 0.5]


def test_rollbacks_restore_good_checkpoints(monkeypatch):
  monkeypatch.setattr(
    rollback, 'restore', lambda parts, saver, state, n: f'state {n}'
  )
  checkpoints = types.SimpleNamespace(every=3)
  parts = types.SimpleNamespace(
    guard=guard.Guard(action='rollback', max_rollbacks=4),
    critic=None,
    config=types.SimpleNamespace(checkpoint=checkpoints),
  )
  history, found = run_state.History(), []
  # All checkpoints exist.
  saver = types.SimpleNamespace(newest_until=lambda n: n)
  # Regular checkpoints: after iterations 2, 5 and 8.
  bad = (1, 3, 7, 8, 10)
  for n in range(11):
    metrics = HEALTHY | ({'ratio/kl': 1.0} if n in bad else {})
    history = dataclasses.replace(history, iteration=n)
    state, history, values = rollback.check_alarms(
      parts, saver, 'same', history, metrics
    )
    found.append((state, history.guard_state.good))
  assert found == [
    ('same', -1),
    ('state -1', 1),  # There is no good checkpoint yet.
    ('same', 1),
    # The policy of checkpoint 2 played iteration 3.
    ('state 1', 3),
    ('same', 3),
    ('same', 3),
    ('same', 5),  # Iteration 6 was good.
    ('state 5', 7),
    ('state 7', 8),
    ('same', 8),
    ('same', 8),  # No more than four rollbacks.
  ]
  assert values == {
    'guard/alarms': 1,
    'guard/rollbacks': 4,
    'guard/step_scale': 0.5**5,
  }
  stored = json.loads(json.dumps(history.to_json()))
  again = run_state.History.from_json(stored, 10)
  assert again.guard_state == history.guard_state


@pytest.mark.parametrize('action', ['warn', 'shrink'])
@pytest.mark.parametrize(
  ('alarm', 'expected'),
  [
    (None, 'state 5'),
    (6, 'state 2'),  # The policy of checkpoint 5 played iteration 6.
    (5, 'state 5'),
  ],
)
def test_good_checkpoints_are_known_when_rollbacks_begin(
  monkeypatch, action, alarm, expected
):
  monkeypatch.setattr(
    rollback, 'restore', lambda parts, saver, state, n: f'state {n}'
  )
  parts = types.SimpleNamespace(
    guard=guard.Guard(action=action),
    critic=None,
    config=types.SimpleNamespace(checkpoint=types.SimpleNamespace(every=3)),
  )
  saver = types.SimpleNamespace(newest_until=lambda n: n)
  history = run_state.History()
  for n in range(8):
    metrics = HEALTHY | ({'ratio/kl': 1.0} if n == alarm else {})
    history = dataclasses.replace(history, iteration=n)
    state, history, _ = rollback.check_alarms(
      parts, saver, 'same', history, metrics
    )
    assert state == 'same'
  parts.guard = guard.Guard(action='rollback')
  history = dataclasses.replace(history, iteration=8)
  state, *_ = rollback.check_alarms(
    parts, saver, 'same', history, HEALTHY | {'ratio/kl': 1.0}
  )
  assert state == expected


@pytest.mark.parametrize(
  ('iteration', 'saved', 'good'),
  [
    (5, [0, 3, 4], 4),
    (5, [0, 3], -1),  # The run had another checkpoint.every before.
    (6, [4, 5], -1),  # A SIGTERM before iteration 6 saved the second one.
  ],
)
def test_a_good_checkpoint_exists(tmp_path, iteration, saved, good):
  parts = types.SimpleNamespace(
    guard=guard.Guard(action='rollback'),
    critic=None,
    config=types.SimpleNamespace(checkpoint=types.SimpleNamespace(every=5)),
    abstract_states=lambda: checkpoint.abstract_state({'policy': jnp.ones(2)}),
  )
  history = run_state.History(iteration=iteration)
  with checkpoint.Checkpointer(tmp_path, keep=9) as saver:
    for n in saved:
      saver.save(n, {'policy': jnp.full(2, float(n))}, {})
    _, history, _ = rollback.check_alarms(parts, saver, None, history, HEALTHY)
    assert history.guard_state.good == good
    if good < 0:
      return
    # It may be gone when it is needed, if later ones were damaged.
    saver.wait()
    for limit in (good, good + 1):
      state = run_state.RunState({'x': jnp.ones(1)})
      state = rollback.restore(parts, saver, state, limit)
      np.testing.assert_array_equal(state.policy, [good, good])


def test_a_rollback_skips_damaged_checkpoints(tmp_path):
  parts = types.SimpleNamespace(
    abstract_states=lambda: checkpoint.abstract_state({'policy': jnp.ones(2)})
  )
  with checkpoint.Checkpointer(tmp_path, keep=9) as saver:
    for n in range(3):
      saver.save(n, {'policy': jnp.full(2, float(n))}, {})
    saver.wait()
    (tmp_path / '1' / checkpoint._MANIFEST).write_text('damaged')
    state = run_state.RunState({'x': jnp.ones(1)})
    state = rollback.restore(parts, saver, state, 1)
    np.testing.assert_array_equal(state.policy, [0, 0])


def test_step_scale_multiplies_the_update():
  before, rows = params(), make_rows()
  moved = [
    jax.tree.map(
      lambda new, old: np.asarray(new, np.float64) - np.asarray(old),
      step(make_learner(**options), rows, **more)[0].params,
      before,
    )
    for options, more in (
      ({}, {}),
      ({'scale_updates': True}, {'step_scale': 0.25}),
    )
  ]
  with pytest.raises(ValueError, match='step_scale=0.25: needs scale_up'):
    step(make_learner(), rows, step_scale=0.25)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(moved[0]))
  assert largest > 1e-4
  jax.tree.map(
    lambda full, part: np.testing.assert_allclose(part, full / 4, atol=1e-7),
    *moved,
  )
