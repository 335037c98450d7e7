"""Tests the measurements of an accelerator, on a CPU."""

import importlib
import json
import signal
import subprocess
import sys
import time

import numpy as np
import programs
import psutil
import pytest

from configs import alfworld
from envs import base
from gigpo_jax.models import published

OVERLONG = 'print("started", flush=True); import time; time.sleep(60)'


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
  monkeypatch.syspath_prepend(str(programs.PROJECT / 'benchmarks'))


def _module(name: str):
  return importlib.import_module(name)


def test_forced_lengths_have_the_distribution_of_the_workload():
  lengths = _module('forced').Lengths()
  turns = np.array(
    [lengths.turns(task, member) for task in range(300) for member in range(8)]
  )
  assert turns.mean() == pytest.approx(24, abs=1.2)
  assert (turns == 50).mean() == pytest.approx(0.35, abs=0.03)
  assert turns.min() == 2
  prompts = [lengths.prompt(seed) for seed in range(2000)]
  assert np.mean(prompts) == pytest.approx(700, rel=0.02)
  responses = [lengths.response((0, 0, task, 1, 2)) for task in range(2000)]
  assert np.mean(responses) == pytest.approx(120, rel=0.03)
  assert 1 <= min(responses) and max(responses) <= 512


def test_forced_lengths_are_functions_of_the_request():
  lengths = _module('forced').Lengths()
  streams = [(0, 3, task, member, 7) for task in range(4) for member in (0, 1)]
  drawn = [lengths.response(stream) for stream in streams]
  assert drawn[::-1] == [lengths.response(s) for s in reversed(streams)]
  assert len(set(drawn)) > 4


class _Pool:
  """Environments that answer at once and never end."""

  num_envs = 2

  def __init__(self):
    self.ended, self._replies = [], []

  def reset(self, env, task):
    self._replies.append((env, base.Observation('', '', '', str(task))))

  def step(self, env, response):
    observation = base.Observation('', '', '', response)
    result = base.StepResult(observation, 0.0, True, '', False, False)
    self._replies.append((env, result))

  def end(self, env):
    self.ended.append(env)

  def receive(self, timeout_secs=None):
    del timeout_secs
    replies, self._replies = self._replies, []
    return replies


def test_the_pool_ends_each_member_after_its_turns():
  inner = _Pool()
  pool = _module('forced').Pool(inner, lambda task, member: task + member)
  played = {}
  for member in range(2):
    task = base.Task('train', 2)
    pool.reset(0, task)
    ((env, reply),) = pool.receive()
    assert (env, reply.text) == (0, 'train/2')
    turns, observation = 0, reply
    while observation is not None:
      pool.step(0, 'look')
      ((_, reply),) = pool.receive()
      turns, observation = turns + 1, reply.observation
    assert reply.done
    played[member] = turns
  assert played == {0: 2, 1: 3}
  assert inner.ended == [0, 0]
  assert pool.num_envs == 2


def _run(out, code: str, limit_secs: float = 60.0) -> dict:
  accelerator = _module('accelerator')
  return accelerator.run('part', [sys.executable, '-c', code], out, limit_secs)


def test_a_part_that_fails_reports_its_last_line(tmp_path):
  result = _run(tmp_path, 'raise MemoryError("no room")')
  assert result['status'] == 'failed'
  assert result['last'] == 'MemoryError: no room'


def test_an_error_of_a_program_is_reported_without_the_notes_of_jax(tmp_path):
  result = _run(
    tmp_path,
    'error = MemoryError("no room\\nfor it"); error.add_note("a note of jax")\n'
    'raise error',
  )
  assert result['last'] == 'MemoryError: no room'


def test_a_part_that_takes_too_long_is_ended(tmp_path):
  result = _run(tmp_path, OVERLONG, 1.0)
  assert result['status'] == 'too long'
  assert result['secs'] < 15
  assert _run(tmp_path, 'print(1)')['status'] == 'done'


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGHUP])
def test_a_lost_terminal_ends_the_running_part(tmp_path, signum):
  if signal.getsignal(signum) == signal.SIG_IGN:
    pytest.skip('the signal is ignored here')
  command = [sys.executable, 'benchmarks/accelerator.py', '--shape=tiny']
  with subprocess.Popen(
    [*command, f'--out={tmp_path}'],
    cwd=programs.PROJECT,
    stdout=subprocess.DEVNULL,
  ) as driver:
    while not (parts := psutil.Process(driver.pid).children()):
      time.sleep(0.05)
    driver.send_signal(signum)
    assert driver.wait(30) == 128 + signum
  assert (tmp_path / 'tiny' / 'table.md').exists()
  # Without a parent, it may remain as a zombie.
  deadline = time.monotonic() + 30
  while parts[0].is_running() and parts[0].status() != psutil.STATUS_ZOMBIE:
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_the_memory_of_the_device_is_for_pytorch_where_it_is_measured(tmp_path):
  accelerator = _module('accelerator')
  part = accelerator.Part('torch', 100)
  variables = accelerator.make_variables(part, tmp_path)
  assert variables['JAX_PLATFORMS'] == 'cpu'


def test_parts_are_chosen_by_value_time_and_status():
  accelerator = _module('accelerator')
  parts = [accelerator.Part('a', 100, 50), accelerator.Part('b', 100, 10)]

  def select(statuses, left_secs):
    part = accelerator.select_part(parts, statuses, left_secs, quick=False)
    return part and part.name

  assert select({}, 60) == 'a'
  assert select({}, 20) == 'b'
  assert select({}, 5) is None
  assert select({'a': 'out of time'}, 60) == 'a'
  for status in ('done', 'failed', 'too long'):
    assert select({'a': status}, 60) == 'b'
    assert select({'a': status, 'b': status}, 60) is None


def test_every_part_has_a_measurement_and_fits_into_nine_minutes(tmp_path):
  accelerator = _module('accelerator')
  measurements = _module('accelerator_parts')
  parts = accelerator.make_parts('gpu', quick=False)
  for part in parts:
    assert part.need_secs < part.limit_secs < 9 * 60 - accelerator._GRACE_SECS
    arguments = accelerator.make_arguments(part, '1.5b', tmp_path)
    options = measurements.parse(arguments)
    assert options.flags == part.flags
    assert options.part.partition('-')[0] in measurements.PARTS
    measurements.change_fields(alfworld.get_config(), options.field)
  assert len({part.name for part in parts}) == len(parts)
  # Those that may exceed the memory of a GPU come last.
  assert [p.name for p in parts[-2:]] == ['update-matrices', 'update-none']


@pytest.mark.parametrize('shape', ['Qwen2.5-1.5B', 'Qwen2.5-7B'])
def test_a_decode_step_reads_the_head_but_not_all_embeddings(shape):
  model = published.SHAPES[shape]
  costs = _module('device_costs')
  matrices = costs.layer_parameters(model) + costs.head_parameters(model)
  # Norms and biases are less than a thousandth.
  read = _module('models').weight_bytes(model)
  assert read == pytest.approx(2 * matrices, rel=1e-3)


RATES = {
  'part': 'rates',
  'name': 'rates',
  'device': 'chip',
  'platform': 'gpu',
  'devices': 1,
  'jax': '1',
  'dtype': 'bfloat16',
  'matmul': 100e12,
  'copy': 1000e9,
}
STEP = {
  'part': 'decode-1024',
  'name': '128 x 1024',
  'slots': 128,
  'prompt': 1024,
  'step_secs': 0.01,
  'step_bytes': 6e9,
  'prefill_secs': 2.0,
  'prefill_flops': 50e12,
  'flags': '',
}


def test_the_table_compares_with_the_measured_rates():
  table = _module('accelerator_table').render(
    [RATES, STEP | {'step_secs': 1.0}, STEP],
    [
      {'part': 'small', 'status': 'failed', 'secs': 3.2, 'last': 'a | b'},
      {'part': 'rates', 'status': 'done', 'secs': 4, 'last': '{}'},
    ],
    '1.5b',
  )
  # 6 GB at 1,000 GB/s take 6 of 10 ms; 50 TFLOP take 0.5 of 2 s.
  assert '| 128 | 1024 |  | 10.00 | 12,800 | 60% | 65,536 | 25% |' in table
  assert '| small | failed | 3 | a / b |' in table
  assert '| rates | done | 4 |  |' in table
  assert 'iteration' not in table


def test_the_table_without_rates_has_no_shares():
  table = _module('accelerator_table').render([STEP], [], '1.5b')
  assert '| 128 | 1024 |  | 10.00 | 12,800 |  | 65,536 |  |' in table


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
  command = [
    sys.executable,
    'benchmarks/accelerator.py',
    '--shape=tiny',
    f'--out={tmp_path}',
  ]
  first = programs.run([*command, '--parts=check'], XLA_FLAGS=programs.QUICK)
  assert 'check ... done' in first
  printed = programs.run(command, timeout=580, XLA_FLAGS=programs.QUICK)
  out = tmp_path / 'tiny'
  ends = [
    json.loads(x) for x in (out / 'parts.jsonl').read_text().split('\n')[:-1]
  ]
  assert [(e['part'], e['status']) for e in ends] == [
    (part.name, 'done')
    for part in _module('accelerator').make_parts('cpu', quick=True)
  ], printed
  table = (out / 'table.md').read_text()
  for start in (
    '| blockwise, texts |',
    '| cold |',
    '| warm |',
    '| rollout |',
    '| learner |',
    '| update | layer |',
    '| log-probs | layer |',
    '| 8 | 64 |',
    '| iteration 1 |',
  ):
    assert f'\n{start}' in table, printed
  records = [
    json.loads(x) for x in (out / 'records.jsonl').read_text().split('\n')[:-1]
  ]
  results = {(r['part'], r['name']): r for r in records}
  # A process reports its highest peak, which is that of the update.
  update = [r['name'] for r in records if r['part'] == 'update-layer']
  assert update == ['log-probs', 'update']
  cold, warm = results['cold', 'start'], results['warm', 'start']
  assert cold['cached'] < warm['cached'] == warm['programs']
  assert max(results['check', 'blockwise, branches']['errors']) < 4e-3
  assert results['iteration', 'rollout']['compilations'] == 0
  assert results['iteration', 'learner']['compilations'] == 0
  assert list((out / 'traces').glob('*/plugins/profile/*/*.xplane.pb'))
  # A rerun has nothing to do.
  assert '...' not in programs.run(command)
