"""Tests that every config and variant loads, is complete and validates."""

import dataclasses
import functools
import itertools
import json
import pathlib
import subprocess
import sys
import types

import pytest

import configs
import envs
import gigpo_jax
import launch
from configs import (
  alfworld,
  base,
  gymnasium,
  helpdesk,
  keydoor,
  mcp,
  minigrid,
  openenv,
  scienceworld,
  search_qa,
  sizes,
  sokoban,
  textarena,
  textworld,
  variants,
  verifiers,
  webshop,
)
from configs.sweeps import (
  ablations,
  held_out,
  main,
  tuning_others,
  tuning_small,
)
from configs.sweeps import keydoor as keydoor_sweep
from configs.sweeps import small as small_sweep
from envs import base as base_env
from gigpo_jax import config as config_lib
from gigpo_jax.algorithms import gigpo
from gigpo_jax.run import config_fields, run_builders, run_config
from gigpo_jax.tools import sweep_runs

# Environments whose warm starts are looked up by `sizes.warm_start`.
OTHERS = (
  gymnasium,
  helpdesk,
  keydoor,
  search_qa,
  sokoban,
  textarena,
  textworld,
)
MODULES = (alfworld, *OTHERS, webshop)
# Environments whose packages may be missing.
EXTERNAL = (mcp, minigrid, scienceworld, verifiers)
# They need continuations, vines, or the success of each agent.
OF_ONE_AGENT = (
  *('a2fm', 'graphgpo', 'pass_at_k', 'pgpo'),
  *('polychromic_vine', 'remax', 'vineppo'),
)
VARIANTS = [
  (module, ','.join(word for word in words if word))
  for module in MODULES
  for words in itertools.product(('', *module.SIZES), ('', *variants.CHANGES))
  # Plug-ins do not depend on the experiment.
  if words[1] not in variants.PLUGINS or (module, words[0]) == (alfworld, '')
  # Only questions have reference answers.
  if words[1] != 'igpo' or module == search_qa
  if words[0] != 'self_play' or words[1] not in OF_ONE_AGENT
]


@pytest.mark.parametrize(
  ('module', 'variant'),
  VARIANTS,
  ids=[f'{m.__name__}:{v}' for m, v in VARIANTS],
)
def test_every_variant_loads_with_valid_values(module, variant: str):
  config = module.get_config(variant)
  assert not list(config_lib._values(config))
  own = config_lib._own_fields(config)
  assert not list(config_fields.unknown(config, own))
  assert not config_lib._field_problems(config)
  name = variant.rpartition(',')[2]
  expected = name if name in variants.ALGORITHMS else 'gigpo'
  assert config.algorithm.name == expected


# Simulators leave sockets and folders to the garbage collector.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('module', EXTERNAL)
@pytest.mark.parametrize('variant', ['', 'tiny', 'smoke', 'tiny,grpo'])
def test_external_environments_load_with_valid_values(module, variant: str):
  config = module.get_config(variant)
  assert not list(config_lib._values(config))
  assert not config_lib._field_problems(config)
  name = module.__name__.rpartition('.')[2]
  pytest.importorskip(name)
  config_lib.validate(config, needs_model=False)


def test_openenv_needs_a_server():
  pytest.importorskip('websockets')
  config = openenv.get_config('grpo')
  assert not list(config_lib._values(config))
  assert not config_lib._field_problems(config)
  with pytest.raises(ValueError, match='env.server=None: must start with'):
    config_lib.validate(config, needs_model=False)
  config.env.server = 'http://127.0.0.1:8000'
  config_lib.validate(config, needs_model=False)
  for size in ('tiny', 'smoke', 'tiny,grpo'):
    config_lib.validate(openenv.get_config(size), needs_model=False)


@pytest.mark.parametrize('module', [alfworld, webshop])
@pytest.mark.parametrize('size', ['', 'tiny', 'smoke', 'tiny,grpo'])
def test_conversations_have_room_for_several_turns(module, size: str):
  config = module.get_config(f'{size},conversation')
  assert not list(config_lib._values(config))
  assert not config_lib._field_problems(config)
  assert config_lib.env_kwargs(config)['context'] == 'conversation'
  plain = module.get_config(size)
  assert 'context' in config_lib.env_kwargs(plain)
  limit = config.rollout.max_prompt_tokens
  assert limit >= 4 * plain.rollout.max_prompt_tokens
  length = limit + config.rollout.max_completion_tokens
  assert config.learner.microbatch_tokens >= 2 * length


def test_environments_without_conversations_refuse_them():
  config = sokoban.get_config('tiny')
  assert 'context' not in config_lib.env_kwargs(config)
  config.env.context = 'conversation'
  assert list(config_lib._combinations(config)) == [
    'env.context=conversation: env.name=sokoban does not offer it in CONTEXTS; '
    'must be history'
  ]
  config = alfworld.get_config('tiny,conversation')
  config.rollout.prompt_overflow = 'truncate_left'
  (line,) = config_lib._combinations(config)
  assert line.startswith('rollout.prompt_overflow=truncate_left: would cut')
  config = alfworld.get_config('tiny')
  config.rollout.earlier_thinking = 'template'
  (line,) = config_lib._combinations(config)
  assert line.startswith('rollout.earlier_thinking=template: has no effect')
  with pytest.raises(
    ValueError, match='tiny,conversation: unknown conversation; accepts'
  ):
    sokoban.get_config('tiny,conversation')


@pytest.mark.parametrize('variant', ['tiny', 'smoke', 'tiny,grpo'])
def test_small_variants_run_on_this_machine(variant: str):
  config_lib.validate(alfworld.get_config(variant))


@pytest.mark.parametrize(
  'variant', ['tiny', 'smoke', 'tiny,grpo', 'tiny,reference_code']
)
def test_small_shops_run_on_this_machine(variant: str):
  config_lib.validate(webshop.get_config(variant), needs_model=False)


@pytest.mark.parametrize('module', MODULES)
def test_tiny_is_evaluated_on_enough_tasks(module):
  config = module.get_config('tiny')
  assert config.evaluation.num_tasks >= 256
  config_lib.validate(config, needs_model=False)


@pytest.mark.parametrize('module', OTHERS)
@pytest.mark.parametrize('variant', ['tiny', 'smoke', 'tiny,sampo'])
def test_small_variants_need_a_model_only(module, variant: str):
  config_lib.validate(module.get_config(variant), needs_model=False)


@pytest.mark.parametrize('module', OTHERS)
@pytest.mark.parametrize('variant', ['tiny', 'smoke', 'tiny,grpo'])
def test_missing_warm_start_names_the_command_that_makes_it(
  module, variant: str, monkeypatch
):
  monkeypatch.setattr(configs, 'find', lambda path: None)
  name, size = module.__name__.rpartition('.')[2], variant.partition(',')[0]
  config = module.get_config(variant)
  assert config.model.path == f'runs/{name}-{size}-sft/policy'
  with pytest.raises(ValueError, match='no such warm start yet') as e:
    config_lib.validate(config)
  (line,) = str(e.value).splitlines()
  if envs.has_expert(config.env.name):
    assert f'launch/sft.py --config=configs/{name}.py:{size}`' in line
    assert line.endswith('then this command again')
  else:
    assert f'has no expert to imitate; the header of configs/{name}' in line
  # The error does not mention the memory of a 1.5B model.
  config.model.path = None
  with pytest.raises(ValueError, match='model.path=None: no weights') as e:
    config_lib.validate(config)
  assert '1.5B' not in str(e.value)


def test_a_local_warm_start_is_preferred_to_the_included_one(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  included = sizes.warm_start('somewhere/alfworld.py', 'tiny')
  assert included == 'configs/warm_starts/alfworld_tiny'
  local = pathlib.Path('runs/alfworld-tiny-sft/policy')
  local.mkdir(parents=True)
  assert sizes.warm_start('somewhere/alfworld.py', 'tiny') == str(local)
  assert sizes.warm_start('guess.py', 'tiny') == 'runs/guess-tiny-sft/policy'


@pytest.mark.parametrize('module', MODULES)
def test_included_warm_starts_have_the_network_of_the_size(module, monkeypatch):
  def find(path: str) -> pathlib.Path | None:
    included = pathlib.Path(path)
    return included if 'warm_starts' in path and included.is_dir() else None

  monkeypatch.setattr(configs, 'find', find)
  for size in module.SIZES:
    config = module.get_config(size)
    path = pathlib.Path(config.model.path or '')
    if 'warm_starts' in path.parts:
      model = json.loads((path / 'config.json').read_text())
      shape = model['num_hidden_layers'], model['hidden_size']
      assert shape == (config.sft.model.layers, config.sft.model.width), size


@pytest.mark.parametrize('module', [helpdesk, keydoor, sokoban, textworld])
def test_mini_shares_the_warm_start_of_tiny(module, monkeypatch):
  monkeypatch.setattr(configs, 'find', lambda path: None)
  mini, tiny = (module.get_config(size) for size in ('mini', 'tiny'))
  assert mini.model.path == tiny.model.path
  assert mini.rollout.groups < tiny.rollout.groups
  assert mini.evaluation.num_tasks == 128
  assert module.get_config('mini,grpo').algorithm.name == 'grpo'


def test_duel_and_self_play_are_the_same_game(monkeypatch):
  monkeypatch.setattr(configs, 'find', lambda path: None)
  duel, own = (textarena.get_config(size) for size in ('duel', 'self_play'))
  assert duel.model.path == 'runs/textarena-self_play-sft/policy'
  assert duel.model.path == own.model.path
  assert (duel.env.id, duel.env.actions) == (own.env.id, own.env.actions)
  assert own.env.opponent == 'self' and own.reward.agents == 'own'
  for config in (duel, own):
    config_lib.validate(config, needs_model=False)


def test_the_car_is_pushed_by_a_number_and_has_its_own_warm_start(monkeypatch):
  monkeypatch.setattr(configs, 'find', lambda path: None)
  car = gymnasium.get_config('car')
  config_lib.validate(car, needs_model=False)
  assert car.model.path == 'runs/gymnasium-car-sft/policy'
  env = envs.make('gymnasium', **config_lib.env_kwargs(car))
  (step, *_) = env.demonstrate(base_env.Task('train', 0), noise=0.0, seed=0)
  assert step[0].actions == ('<force: number from -1 to 1>',)


def test_the_slippery_lake_and_full_rooms_are_minis_of_their_own(monkeypatch):
  lake = gymnasium.get_config('mini')
  assert lake.env.options.is_slippery and lake.rollout.groups == 2
  monkeypatch.setattr(configs, 'find', lambda path: None)
  lake = gymnasium.get_config('mini')
  assert lake.model.path == 'runs/gymnasium-mini-sft/policy'
  full, mini = (alfworld.get_config(v) for v in ('mini_full', 'mini'))
  assert 'receptacles' not in full.env.generator
  assert full.model.path == 'runs/alfworld-mini_full-sft/policy'
  assert full.env.max_steps > mini.env.max_steps
  full, mini = (alfworld.get_config(f'{v},grpo') for v in ('mini_full', 'mini'))
  assert full.optimizer.learning_rate == 2 * mini.optimizer.learning_rate


@pytest.mark.parametrize(
  ('module', 'changes', 'rate'),
  [
    (alfworld, '', 1.5e-4),
    (alfworld, ',hgpo', 1.5e-4),
    (alfworld, ',grpo', 7.5e-5),
    (alfworld, ',rloo', 7.5e-5),
    (alfworld, ',ppo', 7.5e-5),
    (alfworld, ',sampo', 7.5e-5),
    (alfworld, ',sampo,hgpo', 7.5e-5),
    (alfworld, ',lora', 4.5e-4),
    (webshop, '', 7.5e-5),
    (webshop, ',grpo', 7.5e-5),
    (webshop, ',ppo', 1.5e-4),
    (webshop, ',sampo', 7.5e-5),
  ],
)
def test_mini_has_the_tuned_learning_rates(module, changes, rate):
  config = module.get_config(f'mini{changes}')
  assert config.optimizer.learning_rate == pytest.approx(rate)


def test_small_has_the_tuned_learning_rates():
  rates = {
    run.name: run.load().optimizer.learning_rate
    for run in sweep_runs.read(small_sweep.__file__)
  }
  assert rates == {'grpo': 1e-5, 'gigpo': 1e-5, 'g2po': 3e-5}


@pytest.mark.parametrize('sweep', [main, ablations])
def test_sweeps_keep_the_tuned_learning_rates(sweep):
  for run in sweep.RUNS:
    assert 'optimizer.learning_rate' not in run.get('overrides', {})
  # The published results are from these configs.
  rates = {
    (run.experiment, run.name): run.load().optimizer.learning_rate
    for run in sweep_runs.read(sweep.__file__)
  }
  for (experiment, name), rate in rates.items():
    lower = {'alfworld': ('grpo', 'rloo', 'ppo', 'sampo')}.get(
      experiment, ('gigpo', 'grpo', 'rloo', 'sampo')
    )
    assert rate == (7.5e-5 if name in lower else 1.5e-4)


@pytest.mark.parametrize(
  'sweep', [keydoor_sweep, held_out, tuning_others, small_sweep, tuning_small]
)
def test_sweeps_of_other_environments_are_valid(sweep):
  runs = sweep_runs.read(sweep.__file__)
  for config in (run.load() for run in runs):
    assert not list(config_lib._values(config))
    assert not config_lib._field_problems(config)
  is_tuning = sweep in (tuning_others, tuning_small)
  assert all((run.seed >= 100) == is_tuning for run in runs)


@pytest.mark.parametrize('arg', ['huge', 'tiny,smoke', 'tiny;grpo'])
def test_unknown_variants_are_refused_with_a_list(arg: str):
  with pytest.raises(ValueError, match='accepts at most one of 1.5b, 0.5b'):
    alfworld.get_config(arg)
  with pytest.raises(ValueError, match='webshop.py:.*at most one of 1.5b, 7b'):
    webshop.get_config(arg)


def test_alfworld_defaults_equal_the_paper():
  config = alfworld.get_config()
  assert config.rollout.groups == 16
  assert config.rollout.episodes_per_group == 8
  assert config.rollout.max_prompt_tokens == 2048
  assert config.rollout.max_completion_tokens == 512
  assert config.env.max_steps == 50
  assert config.env.history_length == 2
  assert config.env.engine == 'native'
  assert config.optimizer.learning_rate == 1e-6
  assert config.learner.minibatch_rows == 256
  assert config.num_iterations == 150
  assert config.loss.kl_weight == 0.01


def test_webshop_defaults_equal_the_paper():
  config = webshop.get_config()
  assert config.rollout.groups == 16
  assert config.rollout.episodes_per_group == 8
  assert config.rollout.max_prompt_tokens == 4096
  assert config.rollout.max_completion_tokens == 512
  assert config.env.max_steps == 15
  assert config.env.history_length == 2
  assert config.optimizer.learning_rate == 1e-6
  assert config.learner.minibatch_rows == 64
  assert config.num_iterations == 150
  assert config.algorithm.norm == 'mean'
  assert config.evaluation.split == 'test'


def test_other_defaults_equal_the_released_code():
  config = sokoban.get_config()
  assert config.rollout.groups == 32
  assert config.env.max_steps == 15
  assert config.algorithm.norm == 'mean'
  config = search_qa.get_config()
  assert (config.rollout.groups, config.rollout.episodes_per_group) == (256, 5)
  assert (config.env.max_steps, config.env.history_length) == (4, 4)
  assert config.algorithm.anchor == 'similarity'
  assert config.algorithm.similarity_threshold == 0.9
  assert config.algorithm.invalid_penalty == 0.01
  assert config.loss.kl_weight == 0.001 and config.loss.entropy_weight == 0
  assert config.learner.minibatch_rows == 512
  assert config.num_iterations == 200


@pytest.mark.parametrize('module', MODULES)
def test_grpo_changes_the_algorithm_only(module):
  gigpo_config = module.get_config('tiny').to_dict()
  grpo_config = module.get_config('tiny,grpo').to_dict()
  differences = dict(run_config.differences(gigpo_config, grpo_config))
  assert differences == {
    'algorithm.name': ('gigpo', 'grpo'),
    'variant': ('tiny', 'tiny,grpo'),
  }


def test_variants_change_the_expected_fields():
  tiny = alfworld.get_config('tiny')

  def changed(variant):
    differences = dict(
      run_config.differences(
        tiny.to_dict(), alfworld.get_config(f'tiny,{variant}').to_dict()
      )
    )
    del differences['variant']
    return {name: new for name, (_, new) in differences.items()}

  assert changed('dr_grpo') == {
    'algorithm.name': 'dr_grpo',
    'loss.aggregation': 'fixed_length',
  }
  assert changed('ppo') == {
    'algorithm.name': 'ppo',
    'rollout.groups': 64,
    'rollout.episodes_per_group': 1,
  }
  assert changed('reference_code') == {
    'algorithm.episode_stats': 'rows',
    'algorithm.penalty_scope': 'row',
    'algorithm.lone_episode': 'raw',
    'loss.dual_clip': 3.0,
    'loss.kl_clamp': 10.0,
  }
  assert changed('sampo') == {
    'algorithm.anchor': 'observation_and_actions',
    'loss.ratio_level': 'row',
    'loss.clip_epsilon': 3e-3,
    'loss.clip_epsilon_high': 4e-3,
    'loss.aggregation': 'sequence_mean',
    'filter.drop_zero_variance': True,
    'filter.warmup_iterations': 10,
  }


@pytest.mark.parametrize('module', [alfworld, webshop, sokoban])
@pytest.mark.parametrize('name', variants.ALGORITHMS)
def test_reference_code_accepts_the_released_algorithms(module, name):
  variant = f'tiny,reference_code,{name}'
  if name in variants.released():
    config = module.get_config(variant)
    # No option is ignored or refused by the algorithm.
    assert not config_lib._field_problems(config)
    assert (config.loss.dual_clip, config.loss.kl_clamp) == (3.0, 10.0)
    rows = 'rows' if name in ('grpo', 'rloo') else 'trajectories'
    assert config.algorithm.episode_stats == rows
    return
  with pytest.raises(ValueError) as error:
    module.get_config(variant)
  assert str(error.value) == (
    f'--config=...:reference_code,{name}: the released code has no {name}; '
    'reference_code accepts gigpo, grpo, ppo, reinforce_pp, '
    'reinforce_pp_baseline, rloo'
  )


def test_the_released_code_evaluates_128_goals():
  # 0 selects all 500 goals.
  assert webshop.get_config().evaluation.num_tasks == 0
  for variant in ('reference_code', 'tiny,reference_code'):
    assert webshop.get_config(variant).evaluation.num_tasks == 128
  config = webshop.get_config('smoke,reference_code')
  assert config.evaluation.num_tasks == 16


def test_options_of_a_new_algorithm_are_fields(monkeypatch):
  @dataclasses.dataclass(frozen=True)
  class Algorithm(gigpo.Algorithm):
    mixing: float = 0.5

  module = types.ModuleType('gigpo_jax.algorithms.mine')
  module.Algorithm = Algorithm
  monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setitem(variants._MODULES, 'mine', module.__name__)
  for name in ('ALGORITHMS', 'CHANGES'):
    monkeypatch.setattr(variants, name, (*getattr(variants, name), 'mine'))
  config = alfworld.get_config('tiny,mine')
  assert config.algorithm.mixing == 0.5
  assert config.algorithm.to_dict().keys() - {'mixing'} == set(
    alfworld.get_config('tiny').algorithm
  )


@pytest.mark.parametrize(
  ('variant', 'hint'),
  [
    ('gigpo', 'gigpo is the default'),
    ('dapo', 'DAPO has the options filter.drop_zero_variance=True, loss'),
    ('gspo', 'GSPO has the options .* loss.clip_epsilon=3e-4 and loss.clip'),
    ('cispo', 'CISPO has the options loss.surrogate=cispo, loss.clip_eps'),
    ('reinforce_plus_plus', 'reinforce_plus_plus is reinforce_pp'),
    ('3b', 'a size of a pretrained model is that of --config.model.path'),
  ],
)
def test_words_of_other_projects_get_a_hint(variant, hint):
  with pytest.raises(ValueError, match=f'; {hint}'):
    alfworld.get_config(variant)


def test_options_that_the_algorithm_ignores_are_named():
  config = webshop.get_config('smoke,tree_grpo')
  unused = [*run_builders.unused_options(config)]
  assert unused == [('algorithm.norm', 'mean', 'tree_grpo', [])]
  for variant in ('smoke', 'smoke,dr_grpo', 'smoke,sampo'):
    unused = [*run_builders.unused_options(webshop.get_config(variant))]
    assert 'loss.aggregation' not in [field for field, *_ in unused]
    assert not unused or ',' in variant
  config = search_qa.get_config('smoke,igpo')
  assert not list(run_builders.unused_options(config))
  config.algorithm.components = ('reward', 'valid')
  assert list(run_builders.unused_options(config)) == [
    ('algorithm.invalid_penalty', 0.01, 'igpo', [])
  ]
  config = alfworld.get_config('tiny,ppo')
  config.algorithm.discount = 0.9
  assert list(run_builders.unused_options(config)) == [
    ('algorithm.discount', 0.9, 'ppo', ['algorithm.gae_discount'])
  ]


@pytest.mark.parametrize(
  ('variant', 'options', 'ignored'),
  [
    ('smoke,grpo', {}, ['discount']),
    ('smoke,arpo', {}, ['discount']),
    ('smoke,rebel', {}, ['discount']),
    ('smoke,graphgpo', {}, ['discount']),
    ('smoke,graphgpo', {'episode_weight': 0.0}, ['discount', 'lone_episode']),
    ('smoke', {}, []),
    ('smoke', {'step_weight': 0.0}, ['discount']),
    ('smoke', {'episode_weight': 0.0}, ['lone_episode']),
    ('smoke,hgpo', {}, ['lone_episode']),
    ('smoke,hgpo', {'episode_weight': 1.0}, []),
    ('smoke,g2po', {}, []),
  ],
)
def test_options_of_an_absent_advantage_are_named(variant, options, ignored):
  config = alfworld.get_config(variant)
  config.algorithm.update(discount=0.5, lone_episode='raw', **options)
  fields = [field for field, *_ in run_builders.unused_options(config)]
  assert fields == [f'algorithm.{name}' for name in ignored]


def _notes(capsys, variant: str, reward_kl: float = 0.0, **loss) -> str:
  config = alfworld.get_config(variant)
  config.loss.update(loss)
  config.reward.kl_weight = reward_kl
  run_builders.print_notes(config)
  return capsys.readouterr().out


def test_bounds_that_hardly_clip_and_unused_clamps_are_printed(capsys):
  line = 'loss.clip_epsilon=0.2: hardly ever clips the ratios of loss.ratio_'
  assert line in _notes(capsys, 'tiny', ratio_level='row')
  assert line not in _notes(
    capsys, 'tiny', ratio_level='row', surrogate='cispo'
  )
  # Presets have the bounds of their papers.
  for variant in ('tiny', 'tiny,sampo', 'tiny,gagpo'):
    assert 'hardly ever' not in _notes(capsys, variant), variant
  line = 'loss.kl_clamp=10.0: has no effect with loss.kl_weight=0; reward.kl_w'
  variant = 'tiny,reference_code'
  assert line in _notes(capsys, variant, 0.1, kl_weight=0.0)
  assert line not in _notes(capsys, variant, 0.1, kl_weight=0.1)
  assert line not in _notes(capsys, variant, kl_weight=0.0)  # As it is.


def test_options_that_have_no_effect_are_printed(capsys, monkeypatch):
  config = webshop.get_config('smoke')
  config.loss.name = 'my_losses:own'
  config.loss.kl_weight = 0.3
  config.rollout.horizon = ((0, 4), (2, 8))
  module = types.ModuleType('my_losses')
  module.own = lambda outputs, tokens: None
  monkeypatch.setitem(sys.modules, 'my_losses', module)
  run_builders.print_notes(config)
  printed = capsys.readouterr().out
  assert 'loss.kl_weight=0.3: my_losses:own does not use it' in printed
  assert 'num_iterations=2 ends before iteration 2' in printed
  assert 'entropy_weight' not in printed  # It is 0.
  assert 'filter' not in printed and 'evaluation' not in printed
  config.evaluation.update(every=0, inside_rollout=True)
  run_builders.print_notes(config)
  assert (
    'evaluation.inside_rollout=True: evaluation.every=0 makes no evaluation'
  ) in capsys.readouterr().out
  run_builders.print_notes(webshop.get_config('smoke,sampo'))
  assert (
    'filter.warmup_iterations=10: no group is dropped within num_iterations=2'
  ) in capsys.readouterr().out


def test_presets_that_a_field_does_not_apply_are_named():
  config = alfworld.get_config('tiny')
  assert not list(variants.unapplied(config))
  config.algorithm.name = 'g2po'
  assert list(variants.unapplied(config)) == [
    ('g2po', 'algorithm.anchor', 'observation', 'state')
  ]
  config.algorithm.modulators = ('dgpo',)
  assert [name for name, *_ in variants.unapplied(config)] == ['g2po', 'dgpo']
  for name in (*variants.ALGORITHMS, *variants.PLUGINS):
    config = alfworld.get_config(f'tiny,{name}')
    assert not list(variants.unapplied(config)), name


def test_methods_without_a_tuned_rate_have_no_more_than_the_tuned_ones():
  for module, rate in (textworld, 2.5e-5), (sokoban, 7.5e-5), (keydoor, 7.5e-5):
    assert module.get_config('mini,rloo').optimizer.learning_rate == rate


def test_sizes_come_before_methods_and_own_variants_last():
  def game():
    config = base.get_config()
    config.optimizer.learning_rate = 1.0
    return config

  def small(config):
    config.optimizer.learning_rate = 2.0

  def doubled(config):
    config.optimizer.learning_rate *= 2

  make = functools.partial(variants.make, 'folder/game.py')
  sizes = {'large': (), 'small': (small, doubled)}
  for arg, variant, rate in (
    ('', 'large', 1.0),
    ('small', 'small', 4.0),
    ('lora,small,hard', 'small,lora,hard', 3.0),
  ):
    own = {'hard': lambda config: setattr(config.optimizer, 'learning_rate', 3)}
    config = make(arg, game, sizes, own)
    assert (config.variant, config.optimizer.learning_rate) == (variant, rate)
    assert variants.size(config) == variant.partition(',')[0]
  assert make('', game, {}).variant == ''
  assert make('grpo', game, {}).variant == 'grpo'
  with pytest.raises(ValueError, match='configs/game.py:huge: unknown huge; '):
    make('huge', game, sizes)


def test_two_algorithms_are_refused():
  with pytest.raises(ValueError, match='grpo,ppo: more than one algorithm'):
    alfworld.get_config('tiny,grpo,ppo')


def test_all_packages_have_one_parent_folder():
  roots = {
    pathlib.Path(package.__file__).parents[1]
    for package in (configs, envs, gigpo_jax, launch)
  }
  assert len(roots) == 1


def test_configs_import_ml_collections_only():
  code = (
    f'import sys, {", ".join(module.__name__ for module in MODULES)}; '
    'assert not {"jax", "numpy", "gigpo_jax", "envs"} & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def test_base_config_has_no_environment():
  assert base.get_config().env.name is None
