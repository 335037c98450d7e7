"""The turn loop with the toy corridor and a scripted sampler: exact tokens."""

import numpy as np
import pytest

from envs import base
from gigpo_jax import env_pool, metrics, rollout, sampler, tokenizer

RIGHT = '<think>on</think><action>right</action>'
LEFT = '<think>back</think><action>left</action>'


class Scripted:
  """Answers by member and step; writes down what it was asked."""

  def __init__(self, text: tokenizer.Tokenizer):
    self._text = text
    self.waves: list[list[tuple[int, ...]]] = []

  def generate(self, params, requests, *, temperature):
    del params, temperature
    self.waves.append([r.stream for r in requests])
    answers = []
    for request in requests:
      _, _, _, member, step = request.stream
      words = LEFT if (member, step) == (1, 0) else RIGHT
      (ids,) = self._text.encode([words + tokenizer.END_OF_TURN])
      log_probs = -np.arange(len(ids), dtype=np.float32)
      answers.append(sampler.Completion(ids, log_probs, 'stop'))
    return answers


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory):
  directory = str(tmp_path_factory.mktemp('tokenizer'))
  texts = [RIGHT, LEFT, 'Step 1. You are in room 2 of 5. Go left or right.']
  tokenizer.train(texts * 9, directory, vocab_size=330)
  return tokenizer.Tokenizer(directory)


def _collect(text, *, num_envs=4, num_workers=0, tasks=(0, 3), faults=None):
  script = Scripted(text)
  with env_pool.EnvPool(
    'toy',
    {'faults': faults or {}},
    num_envs=num_envs,
    num_workers=num_workers,
    step_timeout_secs=30,
    reset_timeout_secs=30,
    envs_per_group=2,
  ) as pool:
    roller = rollout.Roller(pool, script, text, 200, 'error')
    finished = []
    trajectories = roller.collect(
      {},
      [base.Task('train', index) for index in tasks],
      episodes_per_group=2,
      stream=(rollout.TRAIN, 6),
      temperature=1.0,
      kind=lambda task: f'kind{task.index}',
      on_finished=finished.append,
    )
  assert sum(finished) == len(trajectories)
  return trajectories, script


def test_tokens_streams_rewards_and_order(text):
  trajectories, script = _collect(text)
  assert [(t.group, t.member, t.kind) for t in trajectories] == [
    (0, 0, 'kind0'),
    (0, 1, 'kind0'),
    (1, 0, 'kind3'),
    (1, 1, 'kind3'),
  ]
  # Corridor of 5: from room 0 four steps; the detour left of member 1 costs
  # one from room 0 (a wall) and two from room 3.
  assert [len(t.steps) for t in trajectories] == [4, 5, 1, 3]
  assert [t.reward for t in trajectories] == [10.0] * 4
  step = trajectories[3].steps[0]
  (expected,) = text.encode([LEFT + tokenizer.END_OF_TURN])
  np.testing.assert_array_equal(step.completion_ids, expected)
  (prompt,) = text.render(['Step 0. You are in room 3 of 5. Go left or right.'])
  np.testing.assert_array_equal(step.prompt_ids, prompt)
  assert step.anchor == 'You are in room 3 of 5.'
  # The walk 3 -> 2 -> 3: the same state twice.
  assert trajectories[3].steps[2].anchor == step.anchor
  # (domain, iteration, task, member, step); finished episodes have left.
  assert script.waves[0] == [
    (0, 6, 0, 0, 0),
    (0, 6, 0, 1, 0),
    (0, 6, 3, 0, 0),
    (0, 6, 3, 1, 0),
  ]
  assert [len(wave) for wave in script.waves] == [4, 3, 3, 2, 1]


@pytest.mark.parametrize(
  ('num_envs', 'num_workers'), [(1, 0), (3, 0), (4, 1), (4, 2)]
)
def test_scheduling_changes_no_trajectory(text, num_envs, num_workers):
  expected, _ = _collect(text)
  found, _ = _collect(text, num_envs=num_envs, num_workers=num_workers)
  for a, b in zip(expected, found, strict=True):
    assert (a.task, a.group, a.member) == (b.task, b.group, b.member)
    assert [s.result for s in a.steps] == [s.result for s in b.steps]
    for one, two in zip(a.steps, b.steps, strict=True):
      np.testing.assert_array_equal(one.prompt_ids, two.prompt_ids)
      np.testing.assert_array_equal(one.completion_ids, two.completion_ids)


@pytest.mark.parametrize('fault', ['raise', 'exit', 'raise_at_reset'])
def test_a_failed_environment_is_marked_and_the_others_go_on(text, fault):
  trajectories, _ = _collect(text, num_workers=2, faults={3: fault})
  assert [bool(t.failure) for t in trajectories] == [False, False, True, True]
  assert [t.success for t in trajectories] == [True, True, False, False]
  values = metrics.summarize(trajectories)
  assert values['train/failed_episodes'] == 2
  assert values['train/success_rate'] == 0.5
