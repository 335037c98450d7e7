"""Tests that invalid input is refused in one line that names the field."""

import importlib
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import socket

import pytest

import configs
import envs
from configs import (
  alfworld,
  base,
  endpoint,
  other_trainers,
  scienceworld,
  search_qa,
  sokoban,
  textarena,
  webshop,
)
from gigpo_jax import algorithms, modulators, selectors, tokenizer
from gigpo_jax import config as config_lib
from gigpo_jax import mesh as mesh_lib
from gigpo_jax.models import huggingface
from gigpo_jax.run import (
  agent_check,
  config_fields,
  model_check,
  run_builders,
  run_config,
)
from gigpo_jax.runtime import hardware

PROJECT = pathlib.Path(config_lib.__file__).parents[1]
WARM_START = PROJECT / 'configs' / 'warm_starts' / 'alfworld_tiny'


A2FM = {
  'algorithm.name': 'a2fm',
  'rollout.prefixes': ('<action>', '<think>'),
  'rollout.forced_members': 2,
  'env.require_think': False,
}


def _set(config, field: str, value) -> None:
  *sections, name = field.split('.')
  for section in sections:
    config = config[section]
  with config.ignore_type():
    config[name] = value


def _refusal(**changes) -> str:
  config = alfworld.get_config('tiny')
  for field, value in changes.items():
    _set(config, field.replace('__', '.'), value)
  with pytest.raises(ValueError) as error:
    config_lib.validate(config)
  return str(error.value)


@pytest.mark.parametrize(
  ('field', 'value', 'accepted'),
  [
    ('rollout.episodes_per_group', 1, 'must be at least 2'),
    ('rollout.groups', 0, 'at least 1'),
    ('algorithm.root_share', 0.0, 'must be above 0, at most 1'),
    ('rollout.groups', 10_000, 'more groups than tasks; split train has'),
    ('rollout.temperature', 0.0, 'at least 0.001'),
    ('rollout.prefixes', (1,), 'different texts'),
    ('rollout.prefixes', ('a', 'a'), 'different texts'),
    ('rollout.horizon', None, 'wrong type; must be tuple'),
    ('algorithm.modulators', None, 'wrong type; must be tuple'),
    ('algorithm.components', ('',), 'different texts'),
    ('optimizer.no_decay', ('',), 'different texts'),
    ('lora.targets', ('q', 'q'), 'each once'),
    ('filter.variance_rows', ('a', 'b'), 'two shares'),
    ('reward.functions', (3,), 'wrong type; must be tuple[str, ...]'),
    ('reward.function_weights', ('a',), 'must be tuple[float, ...]'),
    ('reward.function_weights', (float('inf'),), 'must be finite numbers'),
    ('algorithm.components', (1,), 'different texts'),
    ('algorithm.component_weights', ('a', 'b'), 'must be tuple[float, ...]'),
    ('optimizer.no_decay', (1,), 'different texts'),
    ('tasks.stages', ((0, 'pick'),), 'must be tuple[tuple[int, tuple['),
    ('tasks.stages', ((0,),), 'must be tuple[tuple[int, tuple['),
    ('rollout.top_p', 1.5, 'at most 1'),
    ('rollout.top_k', -1, 'must be 0, which is off, or at least 2'),
    ('evaluation.top_p', 0.0, 'above 0'),
    ('evaluation.top_k', -1, '0 is off'),
    ('evaluation.min_p', 2.0, 'between 0 and 1'),
    ('loss.kl_clamp', 0.0, 'None is off'),
    ('rollout.max_prompt_tokens', 5, 'the chat template alone takes'),
    ('rollout.prompt_overflow', 'cut', 'must be one of error'),
    ('rollout.prompt_buckets', (64, 32), 'rising positive sizes'),
    ('rollout.batch_buckets', (), 'rising positive sizes'),
    (
      'algorithm.name',
      'gippo',
      'must be one of a2fm, a_star_po, arpo, dr_grpo, ecpo',
    ),
    ('algorithm.norm', 'std', 'must be one of mean_std, mean'),
    ('algorithm.discount', 1.1, 'between 0 and 1'),
    ('algorithm.penalty_scope', 'row', 'needs episode_stats=rows'),
    ('algorithm.anchor', 'room', 'must be one of observation'),
    ('algorithm.history', -1, 'between 0 and 64'),
    ('algorithm.anchor_history', -1, 'at least 0'),
    ('algorithm.graph_discount', 2.0, 'between 0 and 1'),
    ('algorithm.gae_level', 'word', 'must be one of token, turn'),
    ('loss.ratio_level', 'word', 'must be one of token, row'),
    ('loss.name', 'reinforce', 'row_regression, or module:function'),
    ('loss.entropy_band.weight', -1.0, '0 is off'),
    (
      'loss.entropy_band.low',
      0.5,
      'needs loss.entropy_band.weight to be above 0',
    ),
    ('algorithm.similarity_threshold', 0.8, 'must be 0.9'),
    ('tasks.uniform', 0.2, 'needs tasks.draw to be uncertain'),
    (
      'filter.warmup_iterations',
      3,
      'needs filter.drop_zero_variance to be True',
    ),
    ('tasks.draw', 'hard', 'must be one of epochs, uncertain, stages'),
    ('tasks.stages', ((0, ()),), 'needs tasks.draw to be stages'),
    ('tasks.uniform', 2.0, 'between 0 and 1'),
    ('filter.max_refills', -1, 'at least 0'),
    ('critic.warmup_iterations', 3, 'gigpo has no critic'),
    ('rollout.horizon', ((5, 10), (5, 20)), 'rising iterations'),
    ('rollout.horizon', ((0, 0),), 'turns of at least 1'),
    ('rollout.carry_over', -1, '0 is off'),
    ('env.max_steps', 10**9, 'tokens if all turns have 360; must be at most'),
    ('rollout.carry_over', 8, 'needs loss.old_log_probs=sampler, or loss.tis'),
    ('rollout.max_staleness', 3, 'needs rollout.carry_over to be above 0'),
    ('loss.old_log_probs', 'none', 'must be one of learner, sampler, auto'),
    ('loss.kl_weight', -0.1, 'at least 0'),
    ('learner.microbatch_tokens', 0, 'at least 1'),
    ('mesh.tensor', 0, 'must be at least 1, or -1'),
    ('mesh.data', -1, 'at most one axis may be -1'),
    ('model.dtype', 'float16', 'must be one of bfloat16, float32'),
    ('model.path', '/nowhere', 'no such folder; needs'),
    ('env.name', 'alfred', 'must be one of alfworld, endpoint, '),
    ('env.engine', 'unity', 'must be one of textworld, native'),
    ('env.data_dir', '/nowhere', 'no folder json_2.1.1/train'),
    ('env.generator.receptacles', (9, 2), 'receptacles'),
    ('evaluation.split', 'test', 'must be one of train'),
    ('evaluation.split', None, 'must be a split'),
    ('evaluation.num_tasks', 10**6, 'at most that, or 0 for all'),
    ('pool.num_workers', -1, 'at least 0'),
    ('checkpoint.every', 0, 'at least 1'),
    ('seed', -1, 'non-negative'),
  ],
)
def test_invalid_value_is_refused_in_one_line(field, value, accepted):
  message = _refusal(**{field.replace('.', '__'): value})
  assert accepted in message
  assert len(message.splitlines()) == 1
  assert field.split('.')[-1] in message


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'tasks.draw': 'stages'},
      'tasks.stages=.*: must be .first iteration, types., by increasing',
    ),
    (
      {'algorithm.name': 'gdpo', 'algorithm.component_weights': (1.0,)},
      'algorithm.component_weights=(1.0,): components=',
    ),
    (
      {'algorithm.name': 'ppo', 'algorithm.episode_stats': 'rows'},
      'algorithm.episode_stats=rows: ppo has no such option; must be traj',
    ),
    (
      {'algorithm.history': 4},
      'algorithm.history=4: gigpo has no such option; must be 2',
    ),
    (
      {'algorithm.name': 'grpo', 'algorithm.step_weight': 0.5},
      'algorithm.step_weight=0.5: grpo has no such option',
    ),
    (
      {'algorithm.name': 'rloo', 'algorithm.episode_weight': 0.0},
      'algorithm.episode_weight=0.0: rloo has no such option; must be None',
    ),
    (
      {'algorithm.name': 'dr_grpo'},
      'loss.aggregation=token_mean: dr_grpo .* must be fixed_length',
    ),
    (
      {'algorithm.name': 'gdpo', 'filter.drop_zero_variance': True},
      'filter.drop_zero_variance=True: filters by the total reward',
    ),
    (
      {
        'rollout.carry_over': 8,
        'loss.tis_clip': 2.0,
        'filter.drop_zero_variance': True,
      },
      'rollout.carry_over=8: filter.drop_zero_variance replaces groups',
    ),
    (
      {
        'algorithm.name': 'vineppo',
        'rollout.carry_over': 8,
        'loss.tis_clip': 2.0,
      },
      'rollout.carry_over=8: vineppo needs episodes of a single policy',
    ),
    (
      {'algorithm.name': 'arpo', 'rollout.carry_over': 8, 'loss.tis_clip': 2.0},
      'rollout.carry_over=8: arpo needs episodes of a single policy',
    ),
    (
      {'algorithm.name': 'arpo', 'rollout.episodes_per_group': 1},
      'rollout.episodes_per_group=1: arpo compares .* at least 2',
    ),
    (
      {'algorithm.branch_tokens': 4},
      'algorithm.branch_tokens=4: gigpo has no such option; must be 20',
    ),
    (
      {'algorithm.name': 'a_star_po', 'loss.aggregation': 'sequence_mean'},
      'loss.name=policy_gradient: a_star_po is .*; must be row_regression',
    ),
    (
      {
        'algorithm.name': 'rebel',
        'loss.name': 'row_regression',
        'loss.aggregation': 'sequence_mean',
      },
      'loss.log_ratio_to=reference: rebel is .*; must be old',
    ),
    (
      {'algorithm.name': 'risk_po', 'algorithm.bundle_tasks': 3},
      'algorithm.bundle_tasks=3: rollout.groups=.* do not fill bundles',
    ),
    (
      {
        'algorithm.name': 'remax',
        'rollout.carry_over': 8,
        'loss.tis_clip': 2.0,
      },
      'rollout.carry_over=8: remax needs episodes of a single policy',
    ),
    (
      {'algorithm.name': 'remax', 'reward.kl_weight': 0.1},
      'reward.kl_weight=0.1: the further episodes of remax have the rewards of',
    ),
    (
      {'algorithm.name': 'vineppo', 'reward.overlong_buffer': 2},
      'reward.overlong_buffer=2: the further episodes of vineppo have the rew',
    ),
    (
      {'algorithm.name': 'gdpo', 'reward.kl_weight': 0.1},
      'reward.kl_weight=0.1: changes the total reward, but gdpo uses its comp',
    ),
    (
      {'algorithm.name': 'pass_at_k', 'algorithm.set_size': 8},
      'algorithm.set_size=8: a group has .* must be below that',
    ),
    (
      {'algorithm.name': 'polychromic', 'algorithm.set_size': 8},
      'algorithm.set_size=8: polychromic compares all sets .* and below that',
    ),
    (
      {'algorithm.name': 'polychromic', 'algorithm.set_size': 1},
      'algorithm.set_size=1: polychromic compares all sets .* be at least 2',
    ),
    (
      {'algorithm.name': 'polychromic_vine', 'algorithm.set_size': 4},
      'algorithm.set_size=4: a state has .* = 4 episodes, .* must be at most 3',
    ),
    (
      {
        'algorithm.name': 'polychromic_vine',
        'algorithm.root_share': 0.25,
        'rollout.episodes_per_group': 8,
      },
      'algorithm.root_share=0.25: 2 of .*=8 episodes .* must give at least 3',
    ),
    (
      {
        'algorithm.name': 't_spmo',
        'loss.name': 'row_regression',
        'loss.aggregation': 'sequence_mean',
      },
      'loss.name=row_regression: each token .* own advantage; must be another',
    ),
    (
      {
        'algorithm.name': 'ppo',
        'loss.name': 'row_regression',
        'loss.aggregation': 'sequence_mean',
      },
      'loss.name=row_regression: each token .* own advantage; must be another',
    ),
    (
      {
        'algorithm.name': 'ppo',
        'critic.warmup_iterations': 2,
        'num_iterations': 4,
        'guard.action': 'rollback',
      },
      'critic.warmup_iterations=2: guard.action=rollback .* must be 0',
    ),
    (
      {
        'algorithm.name': 'risk_po',
        'algorithm.bundle_tasks': 2,
        'filter.drop_zero_variance': True,
      },
      'filter.drop_zero_variance=True: the groups that it keeps do not fill',
    ),
    (
      {'algorithm.name': 'gdpo', 'filter.select': ('snr',)},
      'filter.select=snr: filters by the total .* must be another selector',
    ),
    (
      {'algorithm.name': 'gdpo', 'algorithm.component_weights': (math.nan, 1)},
      'algorithm.component_weights=.*nan.*: not finite',
    ),
    (
      {
        'algorithm.name': 'igpo',
        'algorithm.components': (),
        'algorithm.component_weights': (3.0,),
      },
      'algorithm.component_weights=.* must be one weight per component',
    ),
    (
      {'algorithm.name': 'hgpo', 'algorithm.level_exponent': 200.0},
      'algorithm.level_exponent=200.0: .* must be between -20 and 20',
    ),
    (
      {
        'sft.loss': 'dpo',
        'sft.data': 'runs/a/episodes',
        'sft.only_successful': False,
      },
      'sft.only_successful=False: has no effect; needs sft.loss to be '
      'imitation, or must be True',
    ),
    (
      {'guard.max_fisher': 0.1},
      'guard.max_fisher=0.1: has no effect; needs filter.select to have a se',
    ),
    (
      {'guard.max_fisher': 0.1, 'filter.select': ('truncated',)},
      'guard.max_fisher=0.1: has no effect; needs filter.select to have a se',
    ),
    (
      {'algorithm.continuations': 4},
      'algorithm.continuations=4: gigpo has no such option; must be 9',
    ),
    (
      {'loss.name': 'row_regression', 'loss.dual_clip': 3.0},
      'loss.dual_clip=3.0: loss.name=row_regression has no such option; must '
      'be None',
    ),
    (
      {'loss.name': 'row_regression', 'loss.entropy_band.weight': 0.5},
      'loss.entropy_band.weight=0.5: loss.name=row_regression has no such',
    ),
    (
      {'loss.name': 'row_regression', 'loss.kl_target': 0.1},
      'loss.kl_target=0.1: adapts one KL; needs either loss.kl_weight or',
    ),
    (
      {'loss.name': 'row_regression', 'loss.tis_clip': 2.0},
      'loss.tis_clip=2.0: loss.name=row_regression does not read importance '
      'weights; must be None',
    ),
    (
      {'loss.log_ratio_weight': 0.5},
      'loss.log_ratio_weight=0.5: loss.name=policy_gradient has no such option',
    ),
    (
      {'rollout.carry_over': 16, 'loss.tis_clip': 2.0},
      'rollout.carry_over=16: no episode .* below env.max_steps=16, or 0',
    ),
    (
      {
        'rollout.carry_over': 5,
        'loss.tis_clip': 2.0,
        'num_iterations': 3,
      },
      'rollout.carry_over=5: an episode .* num_iterations=3; .* at least 6',
    ),
    (
      {
        'rollout.carry_over': 8,
        'loss.tis_clip': 2.0,
        'loss.name': 'gigpo_jax.losses:Supervised',
      },
      'rollout.carry_over=8: loss.name=.* does not read importance weights',
    ),
    (
      {'algorithm.name': 'ppo', 'loss.ratio_level': 'row'},
      'loss.ratio_level=row: .* needs algorithm.gae_level=turn',
    ),
    (
      {
        'algorithm.name': 'ppo',
        'rollout.episodes_per_group': 1,
        'filter.drop_zero_variance': True,
      },
      'filter.drop_zero_variance=True: one episode has no variance',
    ),
    (
      {
        'loss.entropy_band.weight': 1.0,
        'loss.entropy_weight': 0.1,
        'loss.entropy_band.low': 9.0,
      },
      'loss.entropy_band.low=9.0: above entropy_band.high=1.2',
    ),
    (
      {
        'algorithm.name': 'ppo',
        'critic.warmup_iterations': 2,
        'num_iterations': 2,
      },
      'critic.warmup_iterations=2: .* below num_iterations=2',
    ),
    (
      {
        'filter.select': ('best_and_worst',),
        'rollout.episodes_per_group': 4,
      },
      'filter.kept_episodes=4: .* below rollout.episodes_per_group=4',
    ),
    (
      {'optimizer.no_decay': ('layernorm', 'scale')},
      "optimizer.no_decay=.'layernorm', 'scale'.: no parameter has these",
    ),
    (
      {'loss.entropy_band.weight': 1.0, 'loss.entropy_weight': 0.0},
      'loss.entropy_band.weight=1.0: is a multiple of entropy_weight',
    ),
    (
      {
        'model.decode_attention': 'paged',
        'rollout.max_completion_tokens': 64,
      },
      'model.decode_attention=paged: computes in bfloat16; needs model.dtype',
    ),
    (
      {
        'model.decode_attention': 'paged',
        'model.dtype': 'bfloat16',
        'rollout.cache': 'int8',
        'rollout.max_completion_tokens': 64,
      },
      'rollout.cache=int8: model.decode_attention=paged has no int8',
    ),
    (
      {
        'model.decode_attention': 'paged',
        'model.dtype': 'bfloat16',
        'rollout.max_completion_tokens': 64,
      },
      'paged: the heads of model.path=.* have size 32; must be a multiple',
    ),
    (
      {'algorithm.name': 'hgpo', 'algorithm.anchor_history': 1},
      'algorithm.anchor_history=1: hgpo compares histories itself',
    ),
    (
      {'algorithm.name': 'hgpo', 'algorithm.anchor': 'shuffled'},
      'algorithm.anchor=shuffled: would leave hgpo few equal histories',
    ),
    (
      {'loss.name': 'row_regression', 'filter.select': ('s_grpo',)},
      'filter.select=s_grpo: chooses tokens, but loss.name=row_regression',
    ),
    (
      {'loss.name': 'row_regression', 'filter.select': ('capo',)},
      'filter.select=capo: chooses tokens, but loss.name=row_regression',
    ),
    (
      {'loss.name': 'row_regression', 'filter.select': ('d3s',)},
      'filter.select=d3s: chooses tokens, but loss.name=row_regression',
    ),
    (
      {
        'filter.select': ('s_grpo',),
        'filter.early_tokens': 0,
        'filter.token_probability': 0.0,
      },
      'filter.token_probability=0.0: chooses no token .*; must be above 0',
    ),
    (
      {'filter.select': ('capo',), 'filter.gain_low': 1.0},
      'filter.gain_low=1.0: chooses no token with gain_high=0.01; must be at',
    ),
    (
      {'loss.name': 'row_regression', 'filter.select': ('mismatch',)},
      'filter.select=mismatch: chooses tokens, but loss.name=row_regression',
    ),
    (
      {'algorithm.modulators': ('dcpo',), 'loss.ratio_level': 'row'},
      'loss.ratio_level=row: dcpo gives each token an advantage of its own',
    ),
    (
      {'algorithm.modulators': ('dcpo',), 'loss.name': 'row_regression'},
      'loss.name=row_regression: dcpo gives each token an advantage',
    ),
    (
      {'algorithm.name': 'pass_at_k', 'reward.overlong_buffer': 2},
      'reward.overlong_buffer=2: pass_at_k reads only whether',
    ),
    (
      {
        'algorithm.name': 'pass_at_k',
        'reward.functions': ('reward_examples:brevity',),
      },
      'reward.functions=.*: pass_at_k reads only whether episodes succeed',
    ),
    (
      A2FM | {'reward.kl_weight': 0.1},
      'reward.kl_weight=0.1: a2fm reads only whether episodes succeed',
    ),
    (
      A2FM | {'filter.drop_zero_variance': True},
      'filter.drop_zero_variance=True: a2fm also learns from a group',
    ),
    (
      A2FM | {'rollout.forced_members': 4},
      'rollout.forced_members=4: forces all .*; must be at most 3, or',
    ),
    *(
      (
        {'algorithm.name': 'remax'} | change,
        f'filter.{line}: remax compares with a greedy episode',
      )
      for change, line in (
        ({'filter.drop_zero_variance': True}, 'drop_zero_variance=True'),
        ({'filter.select': ('snr',)}, 'select=snr'),
      )
    ),
    (
      {
        'algorithm.name': 'risk_po',
        'algorithm.bundle_tasks': 2,
        'rollout.carry_over': 8,
        'loss.tis_clip': 2.0,
      },
      'rollout.carry_over=8: the groups that end .* do not fill bundles',
    ),
    (
      {
        'guard.action': 'rollback',
        'rollout.carry_over': 8,
        'loss.tis_clip': 2.0,
      },
      'rollout.carry_over=8: a rollback would continue episodes',
    ),
    (
      {
        'rollout.carry_over': 8,
        'rollout.horizon': ((0, 4), (10, 8)),
        'loss.tis_clip': 2.0,
      },
      'carry_over=8: no episode has more .* below the largest limit .*=8',
    ),
    (
      {
        'teacher.mu_peak': 0.1,
        'teacher.loss': 'distillation',
        'teacher.num_episodes': 50,
      },
      'teacher.num_episodes=50: has no effect, because .*; must be 200',
    ),
    (
      {'reward.num_workers': 4},
      'reward.num_workers=4: has no effect; needs reward.functions to be set',
    ),
    (
      {'reward.timeout_secs': 4.0},
      'reward.timeout_secs=4.0: has no effect; needs reward.functions to be',
    ),
    (
      {'lora.rank': 4, 'model.dtype': 'bfloat16'},
      'rollout.weights=model: would merge adapters .* into bfloat16 matrices',
    ),
    (
      {'lora.rank': 129, 'rollout.weights': 'adapters'},
      'lora.rank=129: the matrices .* have ranks up to 128; must be at most',
    ),
    (
      {'lora.rank': 4, 'rollout.weights': 'int8'},
      'rollout.weights=int8: would merge adapters .* into int8 matrices',
    ),
    (
      {'loss.max_log_prob_gap': 0.1},
      'loss.max_log_prob_gap=0.1: .* needs loss.old_log_probs to be auto',
    ),
    (
      {'evaluation.temperature': 0.0, 'evaluation.repeats': 4},
      'evaluation.repeats=4: greedy episodes of a task are equal',
    ),
    # Typing errors in a config file, which is not locked.
    (
      {'learner.learning_rate': 1e-4},
      '=0.0001: no such field; did you mean optimizer.learning_rate',
    ),
    ({'algorithm.step_wieght': 1.0}, 'no such field; did you mean .*_weight'),
    # Only the section is similar to algorithm.name.
    ({'algorithm.fade': 0.5}, 'no such field; must be one of configs/base.py'),
    ({'beta': 0.1}, '^beta=0.1: no such field; did you mean loss.kl_weight'),
    ({'lr': 0.1}, 'did you mean optimizer.learning_rate'),
    ({'groups': 4}, '^groups=4: no such field; did you mean rollout.groups'),
    ({'loss.gamma': 1.0}, 'no such field; did you mean algorithm.discount'),
    ({'loss.omega': 1.0}, 'no such field; must be one of configs/base.py or'),
    ({'critic.clip': 1.0}, 'critic.clip=1.0: no such field'),
    (
      {'loss.entropy_band.weigth': 1.0},
      'loss.entropy_band.weigth=1.0: no option of .*; did you mean weight',
    ),
  ],
)
def test_conflicting_values_are_refused_in_one_line(changes, message):
  refusal = _refusal(**{k.replace('.', '__'): v for k, v in changes.items()})
  assert len(refusal.splitlines()) == 1
  assert re.search(message.replace('(1.0,)', r'\(1.0,\)'), refusal)


def test_episodes_that_a_horizon_shortens_end_within_the_run():
  config = alfworld.get_config('tiny')
  config.num_iterations, config.loss.tis_clip = 2, 2.0
  config.rollout.carry_over, config.rollout.horizon = 4, ((0, 8),)
  assert not list(config_lib._combinations(config))
  config.rollout.horizon = ()
  (line,) = config_lib._combinations(config)
  assert 'an episode of env.max_steps' in line


def test_an_option_of_several_algorithms_is_refused_once():
  refusal = _refusal(algorithm__name='arpo', algorithm__root_share=1.5)
  assert refusal.endswith('must be above 0, at most 1; 1 is GRPO')
  assert len(refusal.splitlines()) == 1


def test_a_malformed_horizon_is_one_line():
  refusal = _refusal(
    rollout__horizon=(1, 2), rollout__carry_over=4, loss__tis_clip=2.0
  )
  assert len(refusal.splitlines()) == 1
  assert 'must be pairs (iteration, turns)' in refusal


def test_names_of_other_trainers_stand_for_fields_that_exist():
  config = base.get_config()
  names = other_trainers.FIELDS
  assert set(names.values()) <= config_fields.flatten(config).keys()
  # The table of these names leads to the same fields.
  page = (PROJECT / 'docs' / 'running.md').read_text()
  table = page.partition('## Names in other trainers')[2].partition('\n\n\n')[0]
  rows = [
    line.split('|')[1:4] for line in table.splitlines() if line[:1] == '|'
  ]
  for verl_agent, trl, here in rows:
    given = re.findall(r'`([\w.]+)', f'{verl_agent} {trl}')
    fields = re.findall(r'`(\w+\.\w+|num_iterations)', here)
    for name in (x.rpartition('.')[2] for x in given if fields):
      if name in names:
        assert names[name] in fields, name


@pytest.mark.parametrize(
  ('field', 'value', 'hint'),
  [
    ('algorithm.name', 'gspo', 'GSPO has the options loss.ratio_level=row, '),
    ('algorithm.name', 'reinforce_plus_plus', '.* is reinforce_pp; must'),
    ('algorithm.norm', 'mean_norm', 'mean_norm is mean; must'),
    ('loss.name', 'cispo', 'CISPO has the options loss.surrogate=cispo'),
    ('loss.name', 'grpo', 'algorithms are variants, such as :grpo; must be'),
    ('loss.aggregation', 'dr_grpo', 'dr_grpo is fixed_length; must be one of'),
    ('loss.aggregation', 'token-mean', 'token-mean is token_mean; must be'),
    ('loss.kl_estimator', 'mse', 'mse is k2; must be one of k2, k3, abs$'),
    ('loss.ratio_level', 'sequence', 'sequence is row; must be'),
    ('algorithm.norm', 'batch', 'batch is algorithm.name=reinforce_pp_bas'),
    ('loss.kl_estimator', 'k3+', '.* is k2, whose gradient it has; must be'),
  ],
)
def test_values_of_other_trainers_get_a_hint(field, value, hint):
  assert re.match(
    rf'{field}={re.escape(value)}: unknown[^;]*; {hint}',
    _refusal(**{field.replace('.', '__'): value}),
  )


def test_hints_name_accepted_values():
  for field, values in other_trainers._VALUES.items():
    for value, hint in values.items():
      config = alfworld.get_config('tiny')
      fields = config_fields.flatten(config)
      assert set(re.findall(r'[a-z]+\.\w+', hint)) <= fields.keys()
      if here := re.match(rf'{re.escape(value)} is (\w+)(?![\w.=])', hint):
        _set(config, field, here[1])
        refused = f'{field}={here[1]}: unknown'
        problems = config_lib._field_problems(config)
        assert not any(line.startswith(refused) for line in problems)


def test_all_problems_are_reported_at_once():
  message = _refusal(rollout__groups=0, checkpoint__every=0)
  assert len(message.splitlines()) == 2
  message = _refusal(algorithm__name='gippo', algorithm__norm='std')
  assert [x.partition(':')[0] for x in message.splitlines()] == [
    'algorithm.norm=std',
    'algorithm.name=gippo',
  ]


def test_missing_requirements_of_the_paper_are_reported(monkeypatch):
  monkeypatch.delenv('ALFWORLD_DATA', raising=False)
  monkeypatch.setattr(hardware, 'has_accelerator', lambda: False)
  memory = type('Memory', (), {'total': 8 * 2**30})
  monkeypatch.setattr(model_check.psutil, 'virtual_memory', lambda: memory)
  with pytest.raises(ValueError) as error:
    config_lib.validate(alfworld.get_config())
  message = str(error.value)
  for part in (
    'alfworld-download',
    'Qwen/Qwen2.5-1.5B-Instruct',
    'memory=8 GiB',
    configs.TINY,
  ):
    assert part in message


@pytest.mark.parametrize(
  'path',
  ['Qwen/Qwen2.5-1.5B-Instruct', '/nowhere/model', 'nowhere/Qwen2.5-1.5B/'],
)
def test_missing_model_reports_the_problems_of_an_unset_model(
  monkeypatch, path: str
):
  monkeypatch.setattr(hardware, 'has_accelerator', lambda: False)
  memory = type('Memory', (), {'total': 8 * 2**30})
  monkeypatch.setattr(model_check.psutil, 'virtual_memory', lambda: memory)
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  messages = []
  for model_path in (None, path):
    config = alfworld.get_config('1.5b')
    config.model.path = model_path
    with pytest.raises(ValueError) as error:
      config_lib.validate(config)
    messages.append(str(error.value).splitlines())
  for lines in messages:
    fields = [line.partition('=')[0] for line in lines[:-1]]
    assert fields == ['env.data_dir', 'model.path', 'memory']
  # All lines except the one about the path are equal.
  assert messages[0][0] == messages[1][0] and messages[0][2:] == messages[1][2:]
  assert 'full training of 1.5B parameters' in messages[0][2]


def test_only_config_json_is_fetched_if_there_are_problems(
  monkeypatch,
):
  fetched = []

  def fetch(name: str, *, only_config: bool = False) -> str:
    fetched.append(only_config)
    return str(WARM_START)

  monkeypatch.setattr(huggingface, 'download', fetch)
  config = alfworld.get_config('1.5b')
  config.model.path = 'team/small'
  with pytest.raises(ValueError, match=r'env.data_dir=: [^\n]*$'):
    config_lib.validate(config)
  assert fetched == [True]
  config.env.data_dir = 'generated'
  config.env.engine = 'native'
  config_lib.validate(config)
  assert fetched == [True, True, False]


def test_rows_longer_than_the_models_positions_are_refused(tmp_path):
  model = _copy(tmp_path)
  raw = json.loads((model / 'config.json').read_text())
  raw['max_position_embeddings'] = 350
  (model / 'config.json').write_text(json.dumps(raw))
  message = _refusal(model__path=str(model))
  assert message.startswith('rollout.max_prompt_tokens=320: with rollout.max_')
  assert 'completion_tokens=40 above max_position_embeddings=350' in message
  assert len(message.splitlines()) == 1
  raw['rope_scaling'] = {
    'rope_type': 'yarn',
    'factor': 2.0,
    'original_max_position_embeddings': 180,
  }
  (model / 'config.json').write_text(json.dumps(raw))
  config = alfworld.get_config('tiny')
  config.model.path = str(model)
  config_lib.validate(config)


def _copy(tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(WARM_START, tmp_path / 'model'))


def test_model_without_safetensors_is_refused(tmp_path):
  model = _copy(tmp_path)
  (model / 'model.safetensors').unlink()
  assert 'no *.safetensors files' in _refusal(model__path=str(model))


def test_model_without_tokenizer_is_refused(tmp_path):
  model = _copy(tmp_path)
  (model / 'tokenizer_config.json').unlink()
  assert 'no tokenizer_config.json' in _refusal(model__path=str(model))


def test_too_large_vocabulary_is_refused(tmp_path):
  model = _copy(tmp_path)
  words = map(''.join, itertools.product('abcdefghij', repeat=3))
  tokenizer.train(words, str(model), vocab_size=1200)
  assert 'its embedding only' in _refusal(model__path=str(model))


def test_missing_webshop_files_name_the_download(monkeypatch):
  monkeypatch.delenv('WEBSHOP_DATA', raising=False)
  config = webshop.get_config()
  assert list(config_lib._missing_environment(config)) == [
    'env.data_dir=: no WebShop files; run `python -m envs.webshop.download` '
    'and set $WEBSHOP_DATA or env.data_dir to its folder, or use '
    'env.data_dir=generated'
  ]
  monkeypatch.setenv('WEBSHOP_DATA', '/somewhere')
  assert config_lib.env_kwargs(config)['data_dir'] == '/somewhere'
  config.env.data_dir = 'generated'
  assert config_lib.env_kwargs(config)['data_dir'] is None


def test_env_kwargs_match_the_environment():
  config = alfworld.get_config('tiny,sampo')
  kwargs = config_lib.env_kwargs(config)
  assert kwargs['anchor'] == 'observation_and_actions'
  for name, anchor in (
    ('state', 'state'),
    ('shuffled', 'observation'),
    ('turn', 'observation'),
    ('group', 'observation'),
  ):
    config.algorithm.anchor = name
    assert config_lib.env_kwargs(config)['anchor'] == anchor
  config = webshop.get_config('tiny,g2po')
  assert config.algorithm.anchor == 'state'
  assert config_lib.env_kwargs(config)['anchor'] == 'state'
  config = search_qa.get_config('tiny,sampo')
  kwargs = config_lib.env_kwargs(config)
  assert kwargs['data_dir'] is None and 'anchor' not in kwargs
  assert not {'data_dir', 'anchor'} & set(
    config_lib.env_kwargs(sokoban.get_config())
  )


@pytest.mark.parametrize('name', ['vineppo', 'remax', 'polychromic_vine'])
def test_options_that_mix_agents_are_refused(name):
  config = alfworld.get_config(f'mini,planner,{name}')
  config.algorithm.anchor = 'shuffled'
  problems = list(agent_check.conflicts(config))
  assert [problem.partition(':')[0] for problem in problems] == [
    'algorithm.anchor=shuffled',
    f'algorithm.name={name}',
  ]
  config = alfworld.get_config(f'mini,{name}')
  assert not list(agent_check.conflicts(config))


def test_success_of_one_agent_is_unknown():
  config = alfworld.get_config('mini,planner,pass_at_k')
  config.algorithm.modulators = ('empg', 'dgpo')
  config.algorithm.components = ('reward', 'score')
  config.sft.rounds = 1
  assert not list(agent_check.conflicts(config))
  config.reward.agents = 'own'
  problems = list(agent_check.conflicts(config))
  assert [problem.partition(':')[0] for problem in problems] == [
    'algorithm.name=pass_at_k',
    "algorithm.modulators=('empg', 'dgpo')",
    "algorithm.components=('reward', 'score')",
    'sft.only_successful=True',
  ]
  assert 'dgpo reads' in problems[1]
  config = alfworld.get_config('mini,pass_at_k')
  config.reward.agents = 'own'
  assert not list(agent_check.conflicts(config))


@pytest.mark.parametrize('family', [algorithms, modulators, selectors])
def test_plug_ins_that_read_success_say_so(family):
  for path in family.REGISTRY.values():
    module = importlib.import_module(path)
    source = inspect.getsource(module)
    reads = re.search(r'\b(rows|episodes)\.success\b', source)
    assert bool(reads) == ('reads_success' in source), path


def test_options_that_an_environment_lacks_are_refused():
  config = sokoban.get_config('tiny')
  config.algorithm.anchor = 'observation_and_actions'
  assert list(config_lib._environment_conflicts(config)) == [
    'algorithm.anchor=observation_and_actions: env.name=sokoban does not '
    'list the actions of a state; must be one of observation, state, '
    'similarity, turn, group, shuffled'
  ]
  # The environment sets the order of its goals.
  config = webshop.get_config('tiny,reference_code')
  assert config.env.reference_sampling
  config.filter.drop_zero_variance, config.tasks.draw = True, 'uncertain'
  config.rollout.carry_over = 4
  refused = [
    line.partition(':')[0] for line in config_lib._environment_conflicts(config)
  ]
  assert refused == [
    'tasks.draw=uncertain',
    'filter.drop_zero_variance=True',
    'rollout.carry_over=4',
  ]


def test_sections_of_another_environment_are_refused_in_one_line_each():
  lines = _refusal(**{'env.name': 'sokoban'}).splitlines()
  assert all(' has no such option; ' in line for line in lines)
  assert sum(line.startswith('env.generator={') for line in lines) == 1


def test_unknown_options_of_an_environment_are_refused(tmp_path, monkeypatch):
  assert _refusal(**{'env.colour': 'red', 'env.walls': 2}).splitlines()[0] == (
    'env.colour=red: alfworld has no such option; it has '
    + ', '.join(inspect.signature(envs.alfworld.env.Env).parameters)
  )
  code = (
    'def tasks(split, **kwargs): ...\nclass Env:\n  def __init__(self{}): ...'
  )
  for name, arguments, expected in (
    (
      'plain_env',
      '',
      ['env.size=3: plain_env has no such option; it has none'],
    ),
    ('sized_env', ', size', []),
    ('open_env', ', **kwargs', []),
  ):
    (tmp_path / f'{name}.py').write_text(code.format(arguments))
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {'name': name, 'context': 'history', 'size': 3}
    assert list(envs.check_options(name, options)) == expected


def test_what_a_harness_would_wait_for_is_refused():
  config = endpoint.get_config('tiny')
  assert not list(envs.conflicts(config))
  config.rollout.schedule, config.rollout.horizon = 'lockstep', ((0, 2),)
  assert [line.partition(':')[0] for line in envs.conflicts(config)] == [
    'rollout.schedule=lockstep',
    'rollout.horizon=((0, 2),)',
  ]


def test_the_environment_s_reward_is_no_component_with_several_agents():
  config = textarena.get_config('self_play,gdpo')
  config.reward.functions = ('reward_examples:brevity',)
  config.algorithm.components = ('reward', 'valid')
  assert not list(algorithms.conflicts(config))
  config.algorithm.components = ('environment_reward', 'brevity', 'valid')
  (line,) = algorithms.conflicts(config)
  assert 'environment_reward lacks rewards' in line
  alone = alfworld.get_config('mini,gdpo')
  alone.reward.functions = config.reward.functions
  alone.algorithm.components = config.algorithm.components
  assert not list(algorithms.conflicts(alone))


def test_igpo_refuses_a_filter_by_rewards():
  config = search_qa.get_config('tiny,igpo')
  assert not list(algorithms.conflicts(config))
  config.filter.drop_zero_variance = True
  (line,) = algorithms.conflicts(config)
  assert line.startswith('filter.drop_zero_variance=True: igpo also learns')


@pytest.mark.parametrize(
  ('name', 'is_refused'),
  [
    ('snr', True),
    ('gigpo_jax.selectors.snr:Selector', True),
    ('truncated', False),
    ('gigpo_jax.selectors.truncated:Selector', False),
    ('unknown', False),
  ],
)
def test_a_selector_by_rewards_is_refused(name, is_refused):
  config = alfworld.get_config('mini,remax')
  config.filter.select = (name,)
  starts = [line.partition(':')[0] for line in algorithms.conflicts(config)]
  assert starts == [f'filter.select={name}'.partition(':')[0]] * is_refused


def test_more_groups_than_goal_lists_are_refused():
  config = webshop.get_config('tiny,reference_code,ppo')
  assert config.rollout.groups == 64
  assert not list(config_lib._missing_environment(config))
  config.rollout.groups = 129
  assert list(config_lib._missing_environment(config)) == [
    'rollout.groups=129: with env.reference_sampling=True at most 128, each '
    'with a list of goals of its own'
  ]


def test_missing_corpus_is_reported():
  with pytest.raises(ValueError, match=r'no corpus; .*set \$SEARCH_QA_DATA'):
    config_lib.validate(search_qa.get_config(), needs_model=False)


def test_weights_of_another_shape_are_refused(tmp_path):
  model = _copy(tmp_path)
  raw = json.loads((model / 'config.json').read_text())
  raw['intermediate_size'] += 8
  (model / 'config.json').write_text(json.dumps(raw))
  assert 'in the file and' in _refusal(model__path=str(model))


@pytest.mark.parametrize('sizes', [(3, 1, 1), (16, 1, 1), (1, -1, 3)])
def test_impossible_mesh_is_refused(sizes):
  with pytest.raises(ValueError, match='does not fit 8 device'):
    mesh_lib.make_mesh(*sizes)


def test_mesh_that_does_not_divide_the_model_is_refused():
  mesh = mesh_lib.make_mesh(1, 1, 8)
  with pytest.raises(ValueError, match=r'mesh.tensor=8: does not divide'):
    mesh_lib.check(mesh, {'q': (16, 4, 2)}, {'q': ('embed', 'heads', 'head')})


def _start_run(config, tmp_path):
  run_config.save(config, str(tmp_path))
  (tmp_path / 'metrics.jsonl').write_text('{}\n')


def test_workdir_of_another_config_is_refused(tmp_path):
  config = alfworld.get_config('tiny')
  run_config.check_resume(config, str(tmp_path))
  _start_run(config, tmp_path)
  # Running longer, or with other workers, is the same experiment.
  config.num_iterations += 10
  config.pool.num_workers += 1
  run_config.check_resume(config, str(tmp_path))
  config.seed, config.algorithm.discount = 1, 0.9
  with pytest.raises(ValueError) as error:
    run_config.check_resume(config, str(tmp_path))
  message = str(error.value)
  assert 'algorithm.discount=0.9 (was 0.95), seed=1 (was 0)' in message
  assert len(message.splitlines()) == 1
  # A run that failed before its first iteration may be corrected.
  (tmp_path / 'metrics.jsonl').write_text('')
  run_config.check_resume(config, str(tmp_path))
  (tmp_path / 'checkpoints' / '0').mkdir(parents=True)
  with pytest.raises(ValueError, match='another config'):
    run_config.check_resume(config, str(tmp_path))


def test_other_files_and_tasks_at_the_same_path_are_refused(tmp_path):
  config, workdir = alfworld.get_config('tiny'), str(tmp_path)
  stored = {'model.path=a: files': '1', 'split train': '9 tasks (2)'}
  run_config.save(config, workdir, inputs=stored)
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  for same in (None, stored, {'split train': '9 tasks (2)', 'new': '3'}):
    run_config.check_resume(config, workdir, inputs=same)
  other = stored | {'model.path=a: files': '4'}
  problem = r'another config: model.path=a: files=4 \(was 1\); use'
  with pytest.raises(ValueError, match=problem):
    run_config.check_resume(config, workdir, inputs=other)
  run_config.check_resume(config, workdir, inputs=other, allow_change=True)
  # Runs of earlier commits have none, or the files of the model alone.
  run_config.save(config, workdir)
  run_config.check_resume(config, workdir, inputs=other)
  path = tmp_path / 'config.json'
  content = json.loads(path.read_text())
  content['model']['files'] = '1'
  path.write_text(json.dumps(content))
  run_config.check_resume(config, workdir, inputs=other)
  path.write_text(json.dumps(content | {'inputs': ['a']}))
  with pytest.raises(ValueError, match='its inputs are not an object'):
    run_config.check_resume(config, workdir, inputs=other)


def test_the_same_model_may_have_another_path(tmp_path):
  config, workdir = alfworld.get_config('tiny'), str(tmp_path)

  def inputs(path, weights='1', text='2'):
    config.model.path = path
    start = f'model.path={path}: '
    return {f'{start}files': weights, f'{start}tokenizer files': text}

  run_config.save(config, workdir, inputs=inputs('start'))
  (tmp_path / 'metrics.jsonl').write_text('{}\n')
  for path in 'start/', '/models/start':
    run_config.check_resume(config, workdir, inputs=inputs(path))
  others = {}, inputs('other', weights='3'), inputs('other', text='3')
  for other in others:
    with pytest.raises(ValueError, match=r': model.path=other \(was start\);'):
      run_config.check_resume(config, workdir, inputs=other)
  # A run of an earlier release has no inputs.
  run_config.save(config, workdir)
  with pytest.raises(ValueError, match=r': model.path=start \(was other\);'):
    run_config.check_resume(config, workdir, inputs=inputs('start'))


def test_inputs_are_the_model_the_tasks_and_recorded_episodes(tmp_path):
  config = alfworld.get_config('smoke')
  config.model.path = str(WARM_START)
  config.teacher.data = str(tmp_path)
  model, text, train, held_out = run_builders.describe_inputs(config)
  assert model == f'model.path={WARM_START}: files'
  assert text == f'model.path={WARM_START}: tokenizer files'
  assert train == 'env.name=alfworld: split train'
  assert held_out == 'env.name=alfworld: split valid_unseen'
  config.teacher.mu_peak = 0.5
  before = run_builders.describe_inputs(config)
  (tmp_path / 'episodes').write_text('more')
  after = run_builders.describe_inputs(config)
  changed = {name for name in before if before[name] != after[name]}
  assert changed == {f'teacher.data={tmp_path}: files'}
  config.env.generator.seed = 1
  other = run_builders.describe_inputs(config)
  assert other[train] != after[train] and other[model] == after[model]


def test_unwritable_workdir_is_refused(tmp_path):
  run_config.check_workdir(str(tmp_path / 'a' / 'b'))
  assert list((tmp_path / 'a' / 'b').iterdir()) == []
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='--workdir=.*cannot be written'):
    run_config.check_workdir(str(tmp_path / 'file'))
  (tmp_path / 'locked').mkdir(mode=0o500)
  root = os.geteuid() == 0
  if root:  # Root ignores permissions.
    os.seteuid(65534)
  try:
    with pytest.raises(ValueError, match='written .Permission denied'):
      run_config.check_workdir(str(tmp_path / 'locked'))
  finally:
    if root:
      os.seteuid(0)


def test_a_stored_none_is_not_a_missing_field(tmp_path):
  config = alfworld.get_config('tiny')
  _start_run(config, tmp_path)
  config.algorithm.episode_weight = 0.0
  with pytest.raises(ValueError, match=r'episode_weight=0.0 \(was None\)'):
    run_config.check_resume(config, str(tmp_path))


def test_none_and_its_name_differ_in_errors(tmp_path):
  config = alfworld.get_config('tiny')
  config.model.dtype = 'None'
  _start_run(config, tmp_path)
  config.model.dtype = None
  with pytest.raises(ValueError, match=r"model.dtype=None \(was 'None'\);"):
    run_config.check_resume(config, str(tmp_path))


def test_older_run_resumes_with_new_fields(tmp_path):
  config = alfworld.get_config('tiny')
  _start_run(config, tmp_path)
  stored = json.loads((tmp_path / 'config.json').read_text())
  del stored['evaluation']['top_p'], stored['env']['trust_games']
  del stored['filter']
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  run_config.check_resume(config, str(tmp_path))
  config.evaluation.top_p, config.env.trust_games = 0.5, True
  with pytest.raises(ValueError, match='top_p=0.5 .*') as error:
    run_config.check_resume(config, str(tmp_path))
  assert 'env.trust_games=True (was missing)' in str(error.value)


def test_hosts_compare_all_that_decides_programs_and_collectives():
  shared = run_config.experiment(alfworld.get_config('tiny')).keys()
  assert {'mesh.fsdp', 'model.remat', 'checkpoint.every', 'env.name'} <= shared
  assert not {'pool.num_workers', 'metrics.wandb', 'episodes.every'} & shared


def test_fields_that_share_the_work_may_change(tmp_path):
  config = alfworld.get_config('tiny')
  _start_run(config, tmp_path)
  config.mesh.fsdp, config.learner.microbatch_tokens = 2, 1440
  config.pool.step_timeout_secs, config.checkpoint.every = 99.0, 3
  run_config.check_resume(config, str(tmp_path))
  config.pool.max_failed_share = 0.9
  with pytest.raises(ValueError, match=': pool.max_failed_share=0.9 .was'):
    run_config.check_resume(config, str(tmp_path))


def test_allow_change_accepts_and_prints_another_config(tmp_path, capsys):
  config = alfworld.get_config('tiny')
  _start_run(config, tmp_path)
  config.seed = 1
  with pytest.raises(ValueError, match='use another --workdir$'):
    run_config.check_resume(config, str(tmp_path))
  assert not capsys.readouterr().out
  run_config.check_resume(config, str(tmp_path), allow_change=True)
  assert capsys.readouterr().out == (
    'resuming with another config: seed=1 (was 0)\n'
  )


def test_local_model_needs_no_network(monkeypatch):
  def connect(self, address):
    raise AssertionError(f'connects to {address}')

  monkeypatch.setattr(socket.socket, 'connect', connect)
  config_lib.validate(alfworld.get_config('tiny'))


def test_missing_wandb_is_reported(monkeypatch):
  monkeypatch.setattr(config_lib, '_installed', lambda package: False)
  message = _refusal(metrics__wandb='mine')
  assert message == (
    "metrics.wandb=mine: wandb is not installed; run pip install 'wandb>=0.19' "
    "(in a clone: pip install -e '.[wandb]'), or leave it empty"
  )


def test_options_that_replay_episodes_need_an_environment_that_can():
  assert not list(config_lib._replays(endpoint.get_config('tiny')))
  config = endpoint.get_config('tiny,vineppo')
  config.rollout.carry_over = 3
  carry_over, algorithm = config_lib._replays(config)
  assert carry_over == (
    'rollout.carry_over=3: env.name=endpoint cannot replay episodes; must be 0'
  )
  assert algorithm.startswith('algorithm.name=vineppo: ')
  for name in ('arpo', 'polychromic_vine', 'tree_grpo'):
    for module in (endpoint, scienceworld):
      (line,) = config_lib._replays(module.get_config(f'tiny,{name}'))
      assert re.fullmatch(
        f'algorithm.name={name}: env.name=.* cannot replay episodes; must be '
        'an algorithm without continuations or branches',
        line,
      )
  config = alfworld.get_config('tiny,vineppo')
  assert not list(config_lib._replays(config))


def test_a_missing_package_is_reported_once(monkeypatch):
  line = 'env.name=sokoban: sokoban is not installed'

  def refuse(*args, **kwargs):
    raise ValueError('tasks raises ModuleNotFoundError')

  monkeypatch.setattr(config_lib.envs, 'check_installation', lambda *_: [line])
  monkeypatch.setattr(config_lib.envs, 'tasks', refuse)
  config = sokoban.get_config('tiny')
  assert list(config_lib._missing_environment(config)) == [line]


def test_the_numbers_of_tasks_of_what_a_command_plays():
  config = alfworld.get_config('tiny')
  available = len(config_lib.list_tasks(config, 'train'))
  config.evaluation.split = 'train'
  config.evaluation.num_tasks = available + 1
  evaluated = (
    f'evaluation.num_tasks={available + 1}: split train has {available} tasks; '
    'must be at most that, or 0 for all'
  )
  with pytest.raises(ValueError, match=re.escape(evaluated)):
    config_lib.validate(config)
  config_lib.validate(config, evaluates=False)
  config.evaluation.every = 0
  config_lib.validate(config)
  with pytest.raises(ValueError, match=re.escape(evaluated)):
    config_lib.validate(config, evaluates=True)
  config.rollout.groups = available + 1
  with pytest.raises(ValueError, match='more groups than tasks') as error:
    config_lib.validate(config)
  assert len(str(error.value).splitlines()) == 1
  config_lib.validate(config, collects=False)
