"""Tests a complete run on WebShop: warm start from scratch, then GiGPO."""

import json
import sys

import preloaded
import programs
import pytest

SMALL = (
  '--config=configs/webshop.py:smoke',
  '--config.rollout.groups=2',
  '--config.rollout.batch_buckets=(8,)',
  '--config.rollout.prompt_buckets=(320,)',
  '--config.learner.length_buckets=(360,)',
  '--config.env.generator.num_products=350',
  '--config.env.max_steps=4',
  '--config.evaluation.num_tasks=8',
)


def _run(script: str, *flags: str) -> str:
  # Compilation takes longer than the run.
  return preloaded.run(
    [sys.executable, f'launch/{script}.py', *SMALL, *flags],
    XLA_FLAGS=programs.QUICK,
  )


@pytest.mark.slow
def test_a_warm_start_and_two_iterations(tmp_path):
  _run(
    'sft',
    '--config.sft.num_episodes=40',
    '--config.sft.epochs=1',
    '--config.sft.minibatch_rows=16',
    '--config.sft.model.layers=1',
    '--config.sft.model.width=32',
    '--config.sft.model.mlp=32',
    f'--workdir={tmp_path / "sft"}',
  )
  printed = _run(
    'train',
    f'--config.model.path={tmp_path / "sft" / "policy"}',
    f'--workdir={tmp_path / "run"}',
  )
  assert 'EVAL score' in printed
  lines = [
    json.loads(line)
    for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
  ]
  assert [line['iteration'] for line in lines] == [0, 1, 2]
  for line in lines[:2]:
    assert 0 <= line['train/success_rate'] <= line['train/score'] <= 1
    # An almost untrained policy takes inadmissible actions; the metric counts
    # them.
    assert 0 < line['train/inadmissible_action_rate'] <= 1
  assert 'eval/score' in lines[0]
