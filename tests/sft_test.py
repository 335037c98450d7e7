"""Tests of supervised fine-tuning."""

import contextlib
import json
import math
import shutil
import types

import numpy as np
import programs
import pytest

import envs
from configs import alfworld
from envs import base
from gigpo_jax import optimizer, replay, sft, tokenizer
from gigpo_jax.runtime import errors


def _config(**changes):
  config = alfworld.get_config('tiny')
  config.sft.num_episodes = 12
  config.sft.epochs = 2
  config.sft.minibatch_rows = 16
  config.sft.model.layers = 1
  config.sft.model.width = 32
  config.sft.model.mlp = 32
  config.learner.length_buckets = (360,)
  config.mesh.fsdp = 8
  return config


@pytest.mark.slow
def test_same_config_gives_same_policy(tmp_path):
  files = []
  for name in ('a', 'b'):
    workdir = tmp_path / name
    sft.warm_start(_config(), str(workdir))
    lines = [
      json.loads(line)
      for line in (workdir / 'metrics.jsonl').read_text().splitlines()
    ]
    assert lines[-1]['loss/total'] < lines[0]['loss/total']
    files.append((workdir / 'policy' / 'model.safetensors').read_bytes())
  assert files[0] == files[1]
  # The folder keeps its policy.
  other = _config()
  other.sft.noise = 0.5
  with pytest.raises(ValueError, match=r'another config: sft.noise=0.5 .was'):
    sft.warm_start(other, str(tmp_path / 'a'))


def test_a_policy_may_have_started_from_another_path(tmp_path, monkeypatch):
  config, workdir, moved = _config(), tmp_path / 'a', tmp_path / 'moved'
  config.sft.init = ''
  config.model.path = 'configs/warm_starts/alfworld_tiny'
  shutil.copytree(programs.PROJECT / config.model.path, moved)
  monkeypatch.setattr(sft, 'demonstrations', lambda _: [])
  monkeypatch.setattr(sft, '_warm_start', lambda *_: None)
  sft.warm_start(config, str(workdir))
  (workdir / 'policy').mkdir()
  config.model.path = str(moved)
  sft.warm_start(config, str(workdir))
  path = moved / 'tokenizer_config.json'
  path.write_text(path.read_text() + ' ')
  with pytest.raises(ValueError, match=f'{moved}: tokenizer files=.* .was'):
    sft.warm_start(config, str(workdir))


@pytest.mark.parametrize('decay', [True, False])
def test_options_of_rl_do_not_apply(decay):
  config = _config()
  config.rollout.temperature = 0.7
  config.optimizer.update(
    warmup_ratio=0.5, decay_updates=10, decay='cosine', final_rate=0.1
  )
  config.sft.update(warmup_updates=3, decay=decay, learning_rate=1e-3)
  sft._set_learner_options(config, 40)
  schedule = optimizer.AdamW(**config.optimizer).schedule
  assert float(schedule(0)) == pytest.approx(1e-3 / 3)
  expected = [1e-3 / 2, 0] if decay else [1e-3, 1e-3]
  actual = [float(schedule(n)) for n in (20, 40)]
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
  assert config.rollout.temperature == 1


@pytest.mark.parametrize(
  ('shown', 'problem'),
  [
    ([('p', 'go'), 'text'], 'too many values to unpack'),
    ([(5, 'go')], "'int' object is not iterable"),
    (5, "'int' object is not iterable"),
  ],
)
def test_the_mistakes_of_an_expert_are_one_line(monkeypatch, shown, problem):
  config = _config()
  env = types.SimpleNamespace(
    demonstrate=lambda *_, **__: shown, close=lambda: None
  )
  monkeypatch.setattr(envs, 'make_expert', lambda *_, **__: env)
  with pytest.raises(ValueError) as error:
    sft.demonstrations(config)
  text = str(error.value)
  assert text.startswith(f'env.name={config.env.name}: demonstrate raises ')
  assert problem in text and 'must yield pairs' in text and '\n' not in text


@pytest.mark.parametrize(
  ('given', 'response', 'problem'),
  [
    ('p', None, 'response is NoneType, not str'),
    ('p', '\ud800', 'response is not valid Unicode: '),
    ('\ud800', 'go', 'prompt is not valid Unicode: '),
    (base.Observation('p', None, 'a', ''), 'go', 'short_prompt is NoneType, n'),
    ((base.Message('user', 3),), 'go', 'messages[0].text is int, not str'),
    (
      base.Observation('p', '', '', '', tools=('{bad',)),
      'go',
      "tools[0]='{bad': must be a JSON object with a name",
    ),
  ],
)
def test_unusable_steps_of_an_expert_are_one_line(given, response, problem):
  env = types.SimpleNamespace(
    demonstrate=lambda *_, **__: [('p', 'go'), (given, response)]
  )
  with pytest.raises(ValueError, match='^env.name=own: step 1 of ') as error:
    envs.demonstrate('own', env, base.Task('train', 0), noise=0.0, seed=0)
  text = str(error.value)
  assert f'demonstrate is unusable: {problem}' in text
  assert 'must yield pairs' in text and text.isprintable()


@pytest.mark.parametrize('error', [RuntimeError, SystemExit])
def test_an_expert_may_fail_to_close(monkeypatch, error):
  def close():
    raise error('stuck')

  env = types.SimpleNamespace(
    demonstrate=lambda *_, **__: [('p', 'go')], close=close
  )
  monkeypatch.setattr(envs, 'make_expert', lambda *_, **__: env)
  assert len(sft.demonstrations(_config())) == 12
  with pytest.raises(KeyError), envs.closing(env):
    raise KeyError


def test_tasks_that_an_expert_does_not_show_are_left_out(monkeypatch):
  config = _config()
  shown = iter([[], [(base.Observation('p', 'p', 'a', 'p'), 'go')], iter(())])
  env = types.SimpleNamespace(
    demonstrate=lambda *_, **__: next(shown), close=lambda: None
  )
  monkeypatch.setattr(envs, 'make_expert', lambda *_, **__: env)
  config.sft.num_episodes = 2
  assert [len(episode) for episode in sft.demonstrations(config)] == [1]
  config.sft.num_episodes = 1
  with pytest.raises(ValueError, match='its expert showed no step; must show'):
    sft.demonstrations(config)


def test_demonstrations_report_progress(capsys, monkeypatch):
  monkeypatch.setattr(sft, '_REPORT_SECS', 0.0)
  sft.demonstrations(_config())
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 12
  assert lines[4].startswith('5 of 12 expert episodes, ')


def test_a_task_that_comes_again_is_shown_with_other_noise(monkeypatch):
  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: range(1))
  config = _config()
  config.sft.num_episodes, config.sft.noise = 3, 0.5
  one, *others = sft.demonstrations(config)
  assert all(shown != one for shown in others)


@pytest.mark.parametrize('name', ['policy', 'metrics.jsonl'])
def test_results_of_another_command_are_kept(tmp_path, name):
  (tmp_path / name).mkdir()
  with pytest.raises(ValueError, match=f'its {name} is of another command'):
    sft.warm_start(_config(), str(tmp_path))


@pytest.mark.parametrize(('rows', 'report_rows'), [(10, 4), (10, 100)])
def test_the_rate_decays_over_all_updates(monkeypatch, rows, report_rows):
  config = _config()
  config.sft.report_rows, config.sft.minibatch_rows = report_rows, 3
  config.sft.epochs, updates = 2, []

  def stop(_, count):
    updates.append(count)
    raise KeyboardInterrupt

  monkeypatch.setattr(sft, '_set_learner_options', stop)
  real = types.SimpleNamespace(real=np.ones(rows, bool))
  with pytest.raises(KeyboardInterrupt):
    sft._fit(config, None, real, None, '')
  # Chunks of 4, 4 and 2 rows are 2, 2 and 1 mini-batches of at most 3.
  assert updates == [2 * {4: 5, 100: 4}[report_rows]]


@pytest.mark.slow
def test_a_diverging_warm_start_ends_without_a_policy(tmp_path):
  config = _config()
  # Fewer updates in a chunk than may be skipped in a row.
  config.sft.report_rows = config.sft.minibatch_rows
  config.sft.learning_rate = 1e30
  message = 'in_row=5: .* lower sft.learning_rate=1e.30'
  with pytest.raises(errors.RunError, match=message):
    sft.warm_start(config, str(tmp_path))
  assert not (tmp_path / 'policy').exists()


@pytest.mark.slow
def test_interrupted_warm_start_leaves_no_policy(tmp_path, monkeypatch):
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(
      sft, '_fit', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    sft.warm_start(_config(), str(tmp_path))
  assert not (tmp_path / 'policy').exists()
  sft.warm_start(_config(), str(tmp_path))
  folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
  assert folders == ['policy', 'tensorboard']


@pytest.mark.parametrize('completion_only', [True, False])
def test_trained_tokens_of_a_row(tmp_path, completion_only):
  config = _config()
  config.sft.completion_only = completion_only
  pairs = [('look around', 'go'), ('and again', 'stop here')]
  tokenizer.train([t for p in pairs for t in p], str(tmp_path), vocab_size=300)
  text = tokenizer.Tokenizer(str(tmp_path))
  steps = [(envs._observation(prompt), response) for prompt, response in pairs]
  rows = sft.demonstration_rows(config, text, [steps])
  prompts = [
    ids
    for ids, _ in text.fit(
      [p for p, _ in pairs],
      [p for p, _ in pairs],
      max_tokens=320,
      policy='truncate_left',
    )
  ]
  responses = text._encode([r + tokenizer.END_OF_TURN for _, r in pairs])
  for r, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
    expected = [*prompt, *response]
    assert list(rows.tokens[r, : len(expected)]) == expected
    assert rows.lengths[r] == len(expected)
    # No token precedes the first, so it is never trained on.
    num_prompt_tokens = len(prompt) if completion_only else 1
    assert rows.prompt_lengths[r] == num_prompt_tokens


@pytest.mark.parametrize('completion_only', [True, False])
def test_trained_tokens_of_a_conversation(tmp_path, completion_only):
  config = _config()
  config.env.context = 'conversation'
  config.sft.completion_only = completion_only
  steps = [
    (envs._observation((base.Message('user', words),)), response)
    for words, response in (
      ('look around', 'go'),
      ('and again', 'stop here'),
      ('again ' * 400, 'too long'),
    )
  ]
  texts = ['look around', 'and again', 'go', 'stop here', '<think>']
  tokenizer.train(texts, str(tmp_path), vocab_size=300)
  text = tokenizer.Tokenizer(str(tmp_path))
  rows = sft.demonstration_rows(config, text, [steps, steps[:1]])
  raw = [
    text._hf.decode(rows.tokens[r, : rows.lengths[r]])
    for r in np.flatnonzero(rows.real)
  ]
  first = (
    '<|im_start|>user\nlook around<|im_end|>\n<|im_start|>assistant\n'
    'go<|im_end|>'
  )
  second = first + (
    '\n<|im_start|>user\nand again<|im_end|>\n<|im_start|>assistant\n'
    'stop here<|im_end|>'
  )
  # The third turn is beyond the limit.
  assert raw == ([first] if completion_only else []) + [second, first]
  assert list(sft._texts([steps[:1]])) == ['look around', 'go']
  if not completion_only:
    assert set(rows.prompt_lengths[rows.real]) == {1}


def _shown(long, short):
  """Returns two steps; the second has a long prompt, and may have a short."""
  observation = base.Observation(long, short, 'a', long)
  return [(envs._observation('now'), 'look'), (observation, 'go')]


@pytest.mark.parametrize('short', ['now', ''])
@pytest.mark.parametrize('overflow', ['drop_history', 'truncate_left', 'end'])
def test_long_prompts_are_those_of_a_rollout(text, capsys, overflow, short):
  config = _config()
  config.sft.completion_only = True
  config.rollout.max_prompt_tokens = 40
  config.rollout.prompt_overflow = overflow
  long = 'look around, ' * 30 + 'now'
  rows = sft.demonstration_rows(config, text, [_shown(long, short)])
  assert '1 of 2 prompts exceed' in capsys.readouterr().out
  fitted = text.fit(
    ['now', long], ['now', short or long], max_tokens=40, policy=overflow
  )
  prompts = [ids for ids, _ in fitted if ids is not None]
  assert rows.real.sum() == len(prompts) == (1 if overflow == 'end' else 2)
  for r, prompt in enumerate(prompts):
    assert list(rows.tokens[r, : rows.prompt_lengths[r]]) == list(prompt)
  for r, answer in enumerate(['look', 'go'][: len(prompts)]):
    response = [*text.encode([answer])[0], *text.end_of_turn]
    row = rows.tokens[r, : rows.lengths[r]]
    assert list(row[rows.prompt_lengths[r] :]) == response


def test_prompts_that_a_rollout_refuses_are_refused(text):
  config = _config()
  config.rollout.max_prompt_tokens = 40
  shown = _shown('look around, ' * 30, '')
  config.rollout.prompt_overflow = 'error'
  with pytest.raises(ValueError, match='max_prompt_tokens=40: a prompt has'):
    sft.demonstration_rows(config, text, [shown])
  config.rollout.prompt_overflow = 'end'
  with pytest.raises(ValueError, match='max_prompt_tokens=40: every first'):
    sft.demonstration_rows(config, text, [shown[::-1]])


def test_each_epoch_has_each_row_once_in_an_order_of_its_own():
  config = _config()
  config.sft.update(epochs=2, report_rows=16)
  rows = types.SimpleNamespace(real=np.arange(60) < 40)
  orders = [[], []]
  for epoch, row_ids in sft._report_chunks(config, rows):
    assert len(row_ids) <= 16
    orders[epoch] += list(row_ids)
  assert all(sorted(order) == list(range(40)) for order in orders)
  assert orders[0] != orders[1]
  assert list(range(40)) not in orders


def test_demonstrated_tasks_are_the_last_ones(monkeypatch):
  config, shown = _config(), []

  def demonstrate(task, **_):
    shown.append(task.index)
    return [('p', 'go')]

  env = types.SimpleNamespace(demonstrate=demonstrate, close=lambda: None)
  monkeypatch.setattr(envs, 'make_expert', lambda *_, **__: env)
  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: range(5))
  config.sft.num_episodes = 6
  sft.demonstrations(config)
  assert shown == [4, 3, 2, 1, 0, 4]


@pytest.mark.parametrize(
  'name', ['alfworld', 'webshop', 'keydoor', 'sokoban', 'search_qa']
)
def test_an_expert_shows_the_observations_of_a_rollout(name):
  task = base.Task('train', 2)
  with contextlib.closing(envs.make(name)) as env:
    steps = list(envs.demonstrate(name, env, task, noise=0.0, seed=0))
    observation = env.reset(task)
    for shown, response in steps:
      assert shown == observation
      observation = env.step(response).observation


def test_fewer_rows_in_a_report_than_in_an_update_are_refused():
  with pytest.raises(ValueError, match='report_rows=8: an update has .*=16 '):
    sft.Options(report_rows=8, minibatch_rows=16)


def test_a_warm_start_lists_the_tools_of_a_conversation(tmp_path):
  config = _config()
  config.env.context = 'conversation'
  tool = '{"name": "add", "parameters": {}}'
  ask = base.Observation(
    '', '', '', '', messages=(base.Message('user', 'go'),), tools=(tool,)
  )
  steps = [
    (envs._observation(given), response)
    for given, response in (
      (ask, 'a'),
      ((base.Message('tool', '5', call_id='1'),), 'b'),
    )
  ]
  assert list(sft._texts([steps])) == [tool, 'go', 'a', '5', 'b']
  tokenizer.train([tool, 'go'], str(tmp_path), vocab_size=300)
  text = tokenizer.Tokenizer(str(tmp_path))
  rows = sft.demonstration_rows(config, text, [steps])
  assert text._hf.decode(rows.tokens[0, : rows.lengths[0]]) == (
    f'<|im_start|>system\n{tool}\n<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n'
    '<|im_start|>assistant\na<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n'
    '<|im_start|>assistant\nb<|im_end|>'
  )


def test_environment_without_expert_is_refused(tmp_path):
  config = _config()
  with config.unlocked():
    config.env = {'name': 'toy'}
  config.evaluation.num_tasks = 10
  with pytest.raises(ValueError, match='env.name=toy: has no expert'):
    sft.warm_start(config, str(tmp_path))


def test_long_expert_response_is_refused(tmp_path):
  config = _config()
  config.rollout.max_completion_tokens = 8
  with pytest.raises(ValueError, match='max_completion_tokens=8: an expert'):
    sft.warm_start(config, str(tmp_path))


@pytest.fixture(name='text', scope='module')
def fixture_text(tmp_path_factory):
  directory = tmp_path_factory.mktemp('text')
  tokenizer.train(['look around, go'], str(directory), vocab_size=270)
  return tokenizer.Tokenizer(str(directory))


class Episodes(list):
  """A fake episode set; episodes have two steps and the closing step."""

  def __init__(self, fingerprint, *successes, prompt=6):
    self.fingerprint, self.source = fingerprint, successes
    super().__init__(
      {
        'success': success,
        'steps': [
          {
            'prompt_ids': np.arange(prompt, dtype=np.int32) + 100 * n + k,
            'completion_ids': np.array([20 * n + k, 2], np.int32)[: 2 - k],
            'is_last': False,
          }
          for k in range(2)
        ]
        + [{'prompt_ids': [], 'completion_ids': [], 'is_last': True}],
      }
      for n, success in enumerate(successes)
    )


@pytest.mark.parametrize('only_successful', [True, False])
def test_episode_rows_hold_the_sampled_tokens(text, only_successful):
  config = _config()
  assert not config.sft.completion_only  # For an expert's rows only.
  config.sft.update(data='set', only_successful=only_successful)
  episode_set = Episodes(text.fingerprint, False, True)
  rows = sft.imitated_rows(config, text, episode_set)
  expected = [
    [*step['prompt_ids'], *step['completion_ids']]
    for n in ([1] if only_successful else [0, 1])
    for step in episode_set[n]['steps'][:2]
  ]
  assert rows.real.sum() == len(expected)
  for r, tokens in enumerate(expected):
    assert list(rows.tokens[r, : rows.lengths[r]]) == tokens
    assert rows.prompt_lengths[r] == 6


def test_replayed_rows_hold_the_stored_log_probs(text, monkeypatch):
  config = _config()
  episode_set = Episodes(text.fingerprint, True, True)
  for n, episode in enumerate(episode_set):
    for k, step in enumerate(episode['steps'][:2]):
      step['log_probs'] = np.array([-1.0 - n, -0.5], np.float32)[: 2 - k]
      step['advantage'] = 0.5 * n - k
  episode_set[0]['steps'][1]['advantage'] = math.nan  # Not trained on.
  monkeypatch.setattr(sft, 'open_episodes', lambda _: episode_set)
  rows, columns = replay.make_rows(config, text)
  assert rows.real.sum() == 3
  np.testing.assert_array_equal(
    columns['old_log_probs'][:4, :2], [[-1, -0.5], [-2, -0.5], [-2, 0], [0, 0]]
  )
  assert columns['old_log_probs'].shape == rows.completion_mask.shape
  np.testing.assert_array_equal(columns['advantages'][:4], [0, 0.5, -0.5, 0])
  assert list(rows.tokens[2, :7]) == [*range(101, 107), 21]
  for episode in episode_set:
    for step in episode['steps']:
      step['advantage'] = math.nan
  with pytest.raises(ValueError, match='none of 4 steps has an advantage'):
    replay.make_rows(config, text)


@pytest.mark.parametrize(
  ('successes', 'changes', 'message'),
  [
    ((True,), {'fingerprint': 'other'}, 'made with another tokenizer .other'),
    ((False, False), {}, 'no episode of 2 was successful'),
    (
      (True,),
      {'prompt': 400},
      'max_prompt_tokens=320: a step of .* has 400 tokens',
    ),
    ((True, True, True, True), {}, 'outside the vocabulary of 270 tokens'),
    ((True,), {'prompt': 270}, 'outside the vocabulary of 270 tokens'),
  ],
  ids=['tokenizer', 'none', 'long', 'ids', 'first id'],
)
def test_unusable_episodes_are_refused(text, successes, changes, message):
  changes = {'fingerprint': text.fingerprint} | changes
  fingerprint = changes.pop('fingerprint')
  kept, config = Episodes(fingerprint, *successes, **changes), _config()
  config.sft.data = 'set'
  with pytest.raises(ValueError, match=message) as error:
    sft.imitated_rows(config, text, kept)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('init', 'message'),
  [
    ('scratch', 'sft.init=scratch: a new tokenizer'),
    ('', 'sft.data=.*holds no episodes'),
  ],
)
def test_missing_set_and_new_tokenizer_are_refused(tmp_path, init, message):
  config = _config()
  config.sft.data, config.sft.init = str(tmp_path / 'none'), init
  with pytest.raises(ValueError, match=message):
    sft.warm_start(config, str(tmp_path))
