"""Tests of a run's set-up and of what an update reads."""

import types

import jax.numpy as jnp
import numpy as np

from configs import alfworld
from gigpo_jax import checkpoint, guard
from gigpo_jax.run import run_builders, run_config, run_state, update_inputs


def test_a_kill_repeats_iterations_of_the_checkpoints_before_it(tmp_path):
  config = alfworld.get_config('smoke')
  config.checkpoint.every, config.checkpoint.keep = 20, 2
  assert run_builders._max_repeated(config, str(tmp_path)) == 4 * 20 + 1
  run_config.save(config, str(tmp_path))
  # Resumed with more frequent checkpoints, which do not exist yet.
  config.checkpoint.every, config.checkpoint.keep = 1, 3
  assert run_builders._max_repeated(config, str(tmp_path)) == 5 * 20 + 1
  (tmp_path / 'config.json').write_text('{"checkpoint": {"every": "x"}')
  assert run_builders._max_repeated(config, str(tmp_path)) == 5 + 1


def test_the_good_checkpoint_of_a_guard_is_kept(tmp_path):
  state = types.SimpleNamespace(to_dict=lambda: {'x': jnp.zeros(4)})
  for action, kept in (('rollback', ['4', '6']), ('warn', ['6'])):
    parts = types.SimpleNamespace(guard=guard.Guard(action=action))
    folder = tmp_path / action
    with checkpoint.Checkpointer(folder, keep=1) as saver:
      for iteration, good in ((4, -1), (6, 4)):
        history = run_state.History(
          iteration=iteration, guard_state=guard.GuardState(good=good)
        )
        run_builders.save(parts, saver, iteration, state, history)
    assert sorted(path.name for path in folder.iterdir()) == kept


def test_signals_have_the_learning_rate_of_a_shrunk_step(monkeypatch):
  monkeypatch.setattr(
    update_inputs, 'choose_old_log_probs', lambda *_: (np.zeros((1, 1)), {})
  )
  config = alfworld.get_config('smoke')
  config.optimizer.learning_rate = 1e-3
  parts = types.SimpleNamespace(
    config=config,
    guard=guard.Guard(action='shrink'),
    algorithm=None,
    learner=types.SimpleNamespace(signals=lambda *_: {}),
  )
  state = types.SimpleNamespace(
    policy=types.SimpleNamespace(params=None, updates=jnp.zeros((), int))
  )
  history = run_state.History(guard_state=guard.GuardState(step_scale=0.25))
  signals, _, metrics = update_inputs.compute_signals(
    parts, state, history, None, 0
  )
  np.testing.assert_allclose(signals.learning_rate, 0.25e-3)
  np.testing.assert_allclose(metrics['update/learning_rate'], 1e-3)
