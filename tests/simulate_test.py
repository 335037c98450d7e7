"""Tests of the simulated iterations: measured figures and a real rollout."""

import argparse
import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

from envs import base
from gigpo_jax import carry_over, mesh, sampler
from gigpo_jax.models import parameters, published, qwen

_BENCHMARKS = str(pathlib.Path(__file__).parents[1] / 'benchmarks')


@pytest.fixture(name='benchmarks', scope='module')
def fixture_benchmarks():
  """Imports modules of the folder `benchmarks`, which is no package."""
  sys.path.insert(0, _BENCHMARKS)
  import conversation
  import device_costs
  import forced
  import simulate
  import simulated_update
  import virtual_device
  import workload

  sys.path.remove(_BENCHMARKS)
  names = dict(
    conversation=conversation,
    device_costs=device_costs,
    forced=forced,
    simulate=simulate,
    simulated_update=simulated_update,
    virtual_device=virtual_device,
    workload=workload,
  )
  return type('Benchmarks', (), names)


# `configs/alfworld.py:small`.
_SMALL = qwen.QwenConfig(
  vocab_size=1024,
  hidden_size=768,
  intermediate_size=3072,
  num_layers=12,
  num_heads=12,
  num_kv_heads=4,
  head_dim=64,
)


# Measurements on an H100 of benchmarks/results/rollout.md, with prompts of
# 1,024 and 384 tokens and space for 256 tokens of a response.
@pytest.mark.parametrize(
  ('model', 'prompt', 'measured_ms'),
  [
    (published.SHAPES['Qwen2.5-1.5B'], 1024, 6.11),
    (_SMALL, 384, 1.80),
  ],
)
def test_decoding_steps_are_those_measured(
  benchmarks, model, prompt, measured_ms
):
  costs = benchmarks.device_costs
  secs = costs.decode_secs(
    costs.DEVICES['h100'], model, rows=128, positions=128 * (prompt + 256)
  )
  assert 1e3 * secs == pytest.approx(measured_ms, rel=0.03)


# Measurements on an H200 of benchmarks/results/accelerator.md. Plain attention
# reads all 1,280 positions, the kernel those of the prompt and of 40 tokens.
@pytest.mark.parametrize(
  ('positions', 'measured_ms'), [(1280, 3.95), (1064, 3.40)]
)
def test_decoding_steps_of_an_h200_are_those_measured(
  benchmarks, positions, measured_ms
):
  costs, model = benchmarks.device_costs, published.SHAPES['Qwen2.5-1.5B']
  secs = costs.decode_secs(
    costs.DEVICES['h200'], model, rows=128, positions=128 * positions
  )
  assert 1e3 * secs == pytest.approx(measured_ms, rel=0.06)


def test_the_stored_costs_of_an_h100_are_those_measured(benchmarks):
  costs, model = benchmarks.device_costs, published.SHAPES['Qwen2.5-1.5B']
  device = costs.load(f'{_BENCHMARKS}/results/h100.json')
  decode = costs.decode_secs(device, model, rows=128, positions=128 * 1064)
  prefill = costs.prefill_secs(device, model, rows=8, length=1024)
  assert 1e3 * decode == pytest.approx(4.06, rel=0.01)
  assert 16 * prefill == pytest.approx(0.684, rel=0.02)


def test_measured_costs_are_for_settings_of_their_device_only(benchmarks):
  choose = benchmarks.simulate.choose_settings
  device = benchmarks.device_costs.load(f'{_BENCHMARKS}/results/h100.json')
  assert '7b-v5e-16' in choose(None, None)
  assert choose(None, device) == [
    *('1.5b-h100', '1.5b-2xh100', '1.5b-8xh100', '7b-8xh100')
  ]
  assert choose(['1.5b-2xh100'], device) == ['1.5b-2xh100']
  with pytest.raises(ValueError, match=r'^--setting=7b-v5e-16: .* h100; must'):
    choose(['1.5b-h100', '7b-v5e-16'], device)


@pytest.mark.slow
def test_a_complete_iteration_is_the_one_measured(benchmarks):
  simulate = benchmarks.simulate
  options = simulate.change(
    simulate.Options(),
    {'sequences': 6, 'evaluation_inside': False},
  )
  result = simulate.simulate(simulate.SETTINGS['1.5b-h200'], options)
  rollout, update = result.rollout, result.update
  assert rollout.secs == pytest.approx(32.7, rel=0.1)
  assert rollout.occupancy == pytest.approx(0.627, abs=0.02)
  stats = rollout.stats
  padding = 1 - stats.prefill_tokens / stats.padded_tokens
  assert padding == pytest.approx(0.199, abs=0.03)
  # Fitted.
  learner = update.log_prob_secs + update.update_secs
  assert learner == pytest.approx(81.9, rel=0.05)


@pytest.mark.parametrize(
  ('model', 'prompt', 'measured'),
  [
    (published.SHAPES['Qwen2.5-1.5B'], 1024, 204_904),
    (_SMALL, 384, 1_125_857),
  ],
)
def test_prefills_are_those_measured(benchmarks, model, prompt, measured):
  costs = benchmarks.device_costs
  secs = costs.prefill_secs(costs.DEVICES['h100'], model, rows=8, length=prompt)
  assert 8 * prompt / secs == pytest.approx(measured, rel=0.08)


def test_small_runs_use_the_measured_share_of_slots(benchmarks, monkeypatch):
  # 128 episodes of about 24 turns, 15.6 s x 5,000 tokens/s = 25 tokens a turn;
  # 60 % of the episodes fail after 30 turns. 45 % of the slots were used. The
  # host's time was not measured; its threads waited for each other in that run.
  simulate = benchmarks.simulate
  monkeypatch.setitem(published.SHAPES, 'small', _SMALL)
  lengths = benchmarks.forced.Lengths(
    max_turns=30,
    long_share=0.6,
    short_turns=15,
    prompt_tokens=260,
    response_tokens=25,
    max_prompt_tokens=640,
    max_response_tokens=40,
  )
  options = simulate.Options(
    row_buckets=(128,),
    prompt_buckets=(320, 640),
    max_completion=40,
    kernels=benchmarks.device_costs.Kernels(ragged=False),
    host=benchmarks.virtual_device.HostCosts(
      chunk_secs=1e-3, turn_secs=1e-3, env_secs=2e-3, workers=4
    ),
  )
  work = benchmarks.workload.Workload(lengths=lengths)
  played, _ = simulate.simulate_rollout(
    simulate.Setting('small', 'h100'),
    benchmarks.device_costs.DEVICES['h100'],
    options,
    work,
    [work.training()],
  )
  assert played.occupancy == pytest.approx(0.45, abs=0.03)


def test_parameters_are_those_of_the_model(benchmarks):
  model = published.SHAPES['Qwen2.5-7B']
  expected = sampler.parameter_bytes(model, 'model') / 2
  assert benchmarks.device_costs.parameters(model) == pytest.approx(
    expected, rel=1e-3
  )


_TINY = qwen.QwenConfig(
  vocab_size=32,
  hidden_size=8,
  intermediate_size=8,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=8,
  dtype='float32',
)
_SIZES = {
  'prompt_buckets': (12, 16),
  'batch_buckets': (4, 12),
  'max_completion_tokens': 8,
  'decode_tokens': 3,
}


def test_counters_are_those_of_a_real_rollout(benchmarks, monkeypatch):
  # The prompts are hashes, which the vocabulary of a real model lacks.
  monkeypatch.setattr(sampler.checks, 'check_request', lambda *_: None)
  virtual, simulate = benchmarks.virtual_device, benchmarks.simulate
  work = benchmarks.workload.Workload(
    groups=4,
    members=4,
    lengths=benchmarks.forced.Lengths(
      max_turns=6,
      short_turns=3,
      prompt_tokens=11,
      response_tokens=4,
      max_prompt_tokens=16,
      max_response_tokens=8,
    ),
  )
  options = simulate.Options(
    prompt_buckets=_SIZES['prompt_buckets'],
    host=virtual.HostCosts(),
  )

  def play(engine: sampler.Sampler, params: dict) -> sampler.Stats:
    # 14 environments for 12 slots: requests wait, and episodes start late.
    runner = simulate.make_runner(virtual.Clock(), engine, options, work, 14)
    (trajectories,) = runner.run_batches(params, [work.training()])
    assert len(simulate.row_lengths(trajectories)) > 48
    return dataclasses.replace(runner.stats, idle_secs=0.0)

  real = sampler.Sampler(
    _TINY,
    mesh.make_mesh(1, 1, 1, devices=jax.devices()[:1]),
    seed=0,
    stop_ids=(),
    vocab_size=1,
    **_SIZES,
  )
  expected = play(real, parameters.init(_TINY, jax.random.key(0)))
  # A CPU prefills 4 prompts at once.
  with virtual.installed(virtual.Clock(), virtual.Costs(), platform='cpu'):
    actual = play(virtual.make_sampler(**_SIZES), {})
  assert actual == expected
  assert 0 < expected.reused_tokens
  assert expected.decode_tokens < expected.slot_steps


def test_reuse_prefills_a_fifth_of_the_tokens_of_ten_turns(benchmarks):
  options = argparse.Namespace(groups=2, members=3, slots=6)
  lengths = benchmarks.conversation.Lengths(30, 8, 8)
  whole, prompts, everything = (
    benchmarks.conversation.run_virtual(options, lengths, form)[0]
    for form in ('whole', 'prompts', 'all')
  )
  # 10 turns have 45 times the tokens of a turn; 9 of them are new once.
  assert whole.prefill_tokens > 5 * prompts.prefill_tokens
  assert prompts.prefill_tokens > 1.5 * everything.prefill_tokens


def test_the_host_waits_for_the_device_and_overlaps_with_it(benchmarks):
  clock = benchmarks.virtual_device.Clock()
  first = clock.dispatch('decode', 2.0)
  clock.work('host', 0.5)
  second = clock.dispatch('decode', 2.0)
  assert (first, second, clock.now) == (2.0, 4.0, 0.5)
  clock.wait(first)
  clock.work('host', 3.0)
  assert clock.dispatch('decode', 1.0) == 6.0  # The device was idle from 4 on.
  assert clock.secs == {'decode': 5.0} and clock.now == 5.0


def test_speculation_and_reading_used_positions_save_time(benchmarks):
  simulate = benchmarks.simulate
  setting = simulate.SETTINGS['1.5b-h100']
  work = benchmarks.workload.Workload(
    groups=2,
    evaluation_tasks=2,
    lengths=benchmarks.forced.Lengths(max_turns=4, short_turns=2),
  )
  dense = benchmarks.device_costs.Kernels(ragged=False)
  before = simulate.Options(row_buckets=(16,), kernels=dense)

  def secs(**fields) -> float:
    options = simulate.change(before, fields)
    return simulate.simulate(setting, options, work).rollout.secs

  assert secs(tokens_per_step=1.5) < 0.85 * secs()
  assert secs(kernels={'ragged': True}) < secs()
  assert secs(kernels={'layer_scale': 0.5}) < 0.8 * secs()
  assert secs(row_buckets=(4, 8, 16)) < secs()


def test_packing_by_hand(benchmarks):
  update = benchmarks.simulated_update
  lengths = np.array([(500, 100), (300, 100), (200, 100), (60, 40)])
  options = update.Options(sequence_tokens=1000, sequences=1)
  # 600 + 400, then 300 + 100.
  assert update.microbatches(lengths, options, 1) == [
    (1, 1000, 200),
    (1, 1000, 140),
  ]
  # Four devices: two empty sequences fill a microbatch.
  assert update.microbatches(lengths, options, 4) == [(4, 1000, 340)]


def test_costs_of_a_file_replace_those_of_a_device(benchmarks, tmp_path):
  path = tmp_path / 'measured.json'
  path.write_text('{"device": "h100", "update_share": 0.4}')
  device = benchmarks.device_costs.load(str(path))
  default = benchmarks.device_costs.DEVICES['h100']
  assert device.update_share == 0.4 and device.copy_rate == default.copy_rate
  assert device.sources['update_share'] == 'measured.json'


def test_virtual_environments_end_after_their_turns(benchmarks):
  virtual = benchmarks.virtual_device
  clock = virtual.Clock()
  costs = virtual.HostCosts(env_secs=1.0, workers=1)
  pool = benchmarks.forced.Pool(
    virtual.VirtualPool(clock, costs, 2), lambda task, member: 1
  )
  for env in range(2):
    pool.reset(env, base.Task('train', env))
  assert pool.receive(0.5) == [] and clock.now == 0.5
  (env, observation), *_ = pool.receive()
  assert (env, clock.now) == (0, 1.0)
  pool.step(0, '')
  (_, second), *_ = pool.receive()
  assert clock.now == 2.0 and second.prompt != observation.prompt
  ((_, result),) = pool.receive()
  assert result.done and clock.now == 3.0


def test_hosts_share_the_episodes_of_a_batch(benchmarks):
  work = benchmarks.workload.Workload(groups=2, members=3)
  batch = work.training(4)
  assert [task.index for task in batch.tasks] == list(range(24, 30))
  parts = [benchmarks.workload.host_part(batch, n, 4) for n in range(4)]
  assert [len(part.tasks) for part in parts] == [1, 2, 1, 2]
  assert [task for part in parts for task in part.tasks] == batch.tasks
  paused = dataclasses.replace(batch, tasks=(), paused=tuple('abc'))
  parts = [benchmarks.workload.host_part(paused, n, 2) for n in range(2)]
  assert [part.paused for part in parts] == [['a'], ['b', 'c']]


@pytest.mark.parametrize('hosts', [1, 2, 8])
def test_simulated_episodes_pause_and_have_all_of_their_turns(
  benchmarks, hosts
):
  simulate = benchmarks.simulate
  lengths = benchmarks.forced.Lengths(max_turns=7, short_turns=3)
  work = benchmarks.workload.Workload(
    groups=4, members=2, evaluation_tasks=0, lengths=lengths
  )
  iterations = benchmarks.workload.Iterations(work, carry_over.CarryOver(3))
  setting = simulate.Setting('Qwen2.5-1.5B', 'h100', hosts, hosts=hosts)
  device = benchmarks.device_costs.DEVICES['h100']
  options = simulate.Options(row_buckets=(8,), carry_over=3)

  def run(batches):
    times, played = simulate.simulate_rollout(
      setting, device, options, work, batches
    )
    assert times.secs > 0
    return played

  trained = [t for _ in range(6) for t in iterations.play(run)]
  assert len(trained) >= 24
  for t in trained:
    assert len(t.steps) == lengths.turns(t.task.index, 0)
  # Three turns in each iteration.
  assert {max(step.age for step in t.steps) for t in trained} == {0, 1, 2}
