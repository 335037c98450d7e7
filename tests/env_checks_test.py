"""Tests of the checks of options and tasks of all environments."""

import pytest

import envs
from configs import helpdesk, keydoor
from envs import base, checks
from gigpo_jax import builders, tasks
from gigpo_jax import config as config_lib
from gigpo_jax.models.huggingface import layout

_INF, _NAN = float('inf'), float('nan')


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'timeout_secs': _NAN}, 'env.timeout_secs=nan: out of range; must be'),
    ({'timeout_secs': 0.0}, 'env.timeout_secs=0.0: out of range; must be'),
    ({'success_score': _NAN}, 'env.success_score=nan: out of range; must be'),
    ({'success_return': _INF}, 'env.success_return=inf: out of range'),
    ({'max_result_chars': -1}, 'must be an integer of at least 1'),
    ({'max_steps': _NAN}, 'must be an integer of at least 1'),
    ({'max_steps': 2.5}, 'must be an integer of at least 1'),
    ({'max_steps': 2**31}, 'must be at most 2,147,483,647'),
    ({'max_steps': 'ten'}, 'env.max_steps=ten: out of range; must be an int'),
    ({'generator': {'seed': '1'}}, 'env.generator.seed=1: out of range'),
  ],
)
def test_unusable_numbers_are_reported(options, line):
  (problem,) = checks.shared(options)
  assert line in problem


def test_usable_numbers_pass():
  options = {'timeout_secs': 0.5, 'success_return': -3.0, 'max_steps': 1}
  assert not list(checks.shared(options | {'success_score': None}))


@pytest.mark.parametrize(
  ('config', 'field', 'value', 'line'),
  [
    (keydoor, 'max_steps', 'ten', 'env.max_steps=ten: out of range'),
    (keydoor, 'max_steps', None, 'env.name=keydoor: tasks raises TypeError'),
    (keydoor, 'generator.seed', 5000, 'env.generator.seed=5000: must be from'),
    (keydoor, 'generator', 'x', 'env.generator=x: must be a group of options'),
    (helpdesk, 'generator.users', 'x', 'env.generator.users=x: out of range'),
    (helpdesk, 'generator.seed', 'x', 'env.generator.seed=x: out of range'),
  ],
)
def test_options_of_a_wrong_type_are_one_line(config, field, value, line):
  experiment = config.get_config('tiny')
  # A config file may replace config.env.
  with experiment.ignore_type():
    *group, name = field.split('.')
    owner = experiment.env[group[0]] if group else experiment.env
    with owner.unlocked():
      owner[name] = value
  with pytest.raises(ValueError, match=line) as raised:
    config_lib.validate(experiment, needs_model=False)
  assert len(str(raised.value).splitlines()) == 1


class _Tasks(tuple):
  def task_type(self, index):
    return self[index]


@pytest.mark.parametrize(
  ('listed', 'line'),
  [
    (_Tasks(), 'split train has no tasks'),
    (_Tasks([None] * 99), 'task_type(0) of split train is None'),
  ],
)
def test_unusable_tasks_are_reported(monkeypatch, listed, line):
  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: listed)
  with pytest.raises(ValueError, match='env.name=keydoor') as raised:
    config_lib.validate(keydoor.get_config('tiny'), needs_model=False)
  assert line in str(raised.value)


@pytest.mark.parametrize(
  ('count', 'line'),
  [
    (8.0, "raises TypeError: 'float' object cannot be interpreted as an int"),
    (KeyError('x'), "raises KeyError: 'x' (env_checks_test.py:"),
    (-3, 'is -3; must return an integer from 0 to 2,147,483,647'),
    (2**62, f'is {2**62}; must return an integer from 0 to 2,147,483,647'),
    (2**70, 'is too large; must return an integer from 0 to 2,147,483,647'),
  ],
)
def test_unusable_numbers_of_tasks_are_reported(monkeypatch, count, line):
  class Tasks(_Tasks):
    def __len__(self):
      if isinstance(count, Exception):
        raise count
      return count

  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: Tasks())
  with pytest.raises(ValueError, match='^env.name=keydoor: __len__') as raised:
    config_lib.validate(keydoor.get_config('tiny'), needs_model=False)
  assert line in str(raised.value)
  assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
  'task_type', [None, '', 'a\nb', '\x1b[31mred', '\ud800', 'x' * 129]
)
def test_unusable_task_types_are_reported(task_type):
  listed = tasks.CheckedTasks(_Tasks(['x' * 128, task_type]), 'own', 'valid')
  assert listed.task_type(0) == 'x' * 128
  with pytest.raises(ValueError, match=r'^env.name=own: task_type\(1\)') as e:
    listed.task_type(1)
  text = str(e.value)
  assert text.endswith('; must be a text of 1 to 128 printable characters')
  assert text.isprintable()


def test_an_unusable_type_of_a_late_task_ends_no_run(monkeypatch, capsys):
  types = [*['a'] * 600, 'a\nb', None]
  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: _Tasks(types))
  config = keydoor.get_config('tiny')
  config_lib.validate(config, needs_model=False)
  task_type = builders.make_task_type(config)
  names = [task_type(base.Task('train', n)) for n in (0, 600, 600, 601)]
  assert names == ['a', 'unknown', 'unknown', 'unknown']
  lines = capsys.readouterr().out.splitlines()
  assert [line.partition(' of split')[0] for line in lines] == [
    'env.name=keydoor: task_type(600)',
    'env.name=keydoor: task_type(601)',
  ]


class _FailingTasks(_Tasks):
  def task_type(self, index):
    return {0: 'a', 1: None}[index]

  def draw(self, iteration, groups):
    return None if iteration else self.order


def test_errors_of_tasks_have_one_line(monkeypatch):
  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: _FailingTasks([0] * 9))
  listed = config_lib.list_tasks(keydoor.get_config('tiny'), 'train')
  assert len(listed) == 9 and listed.task_type(0) == 'a'
  for call, line in (
    (lambda: listed.task_type(1), r'task_type\(1\) of split train is None'),
    (
      lambda: listed.task_type(2),
      r'keydoor: task_type\(2\) .*KeyError: 2 ',
    ),
    (
      lambda: listed.draw(0, 8),
      r"keydoor: draw\(0, 8\) .*no attribute 'order'",
    ),
    (lambda: listed.draw(1, 8), r'keydoor: draw\(1, 8\) .*TypeError'),
  ):
    with pytest.raises(ValueError, match=line) as raised:
      call()
    assert len(str(raised.value).splitlines()) == 1
  assert not hasattr(listed, 'answer')
  monkeypatch.setattr(_FailingTasks, 'draw', None)
  assert listed.draw is None


@pytest.mark.parametrize(
  'drawn', [range(7), [*range(7), 999], range(-1, 7), [3, 3, *range(6)]]
)
def test_unusable_draws_are_reported(monkeypatch, drawn):
  tasks = _Tasks(['a'] * 999)
  tasks.draw = lambda iteration, groups: list(drawn)
  monkeypatch.setattr(envs, 'tasks', lambda *_, **__: tasks)
  with pytest.raises(ValueError, match='draws the tasks .* for 8 groups'):
    config_lib.validate(keydoor.get_config('tiny'), needs_model=False)
  tasks.draw = lambda iteration, groups: range(3, 3 + groups)
  config_lib.validate(keydoor.get_config('tiny'), needs_model=False)


def test_empty_tensors_claim_no_experts():
  name = 'model.layers.0.mlp.experts.down_proj'
  whole = list(layout.split_experts(name, (10**9, 0, 4)))
  assert whole == [(name, (10**9, 0, 4), ())]
  assert len(list(layout.split_experts(name, (3, 2, 4)))) == 3
