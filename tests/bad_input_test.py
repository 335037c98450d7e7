"""Tests that commands refuse invalid input in one line, early.

That is before any device memory or worker process is used, and offline.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Callable

import numpy as np
import preloaded
import pytest
import safetensors.numpy
from programs import PROJECT

from configs import alfworld
from envs.alfworld import games
from gigpo_jax.run import run_config
from gigpo_jax.runtime import files

WARM_START = PROJECT / 'configs' / 'warm_starts' / 'alfworld_tiny'
TINY = '--config=configs/alfworld.py:tiny'


@dataclasses.dataclass(frozen=True)
class Case:
  """A command with invalid input, and its expected error.

  Attributes:
    flags: flags of the command; {dir} is a separate folder for each case.
    expected: parts of the error line: the problem and the remedy.
    prepare: fills the folder.
    script: name of the script in launch/.
    status: exit status of the process.
    devices: whether the check needs initialized devices.
  """

  flags: tuple[str, ...]
  expected: tuple[str, ...]
  prepare: Callable[[pathlib.Path], object] = lambda folder: None
  script: str = 'train'
  status: int = 2
  devices: bool = False


def _field(name: str, value: object, *expected: str) -> Case:
  return Case((TINY, f'--config.{name}={value}'), (name, *expected))


def _flags(*flags: str, expected: tuple[str, ...], **kwargs) -> Case:
  return Case(flags, expected, **kwargs)


_OWN_CONFIG = """
from configs import variants

def get_config(arg):
  variants.parse(arg, 'game', sizes=(), changes=('tiny',))
"""

FIELDS = (
  _field('seed', -1, 'non-negative'),
  _field('seed', 'x', 'seed'),
  Case((TINY, '--config.sed=1'), ('sed',)),
  _field('num_iterations', 0, 'at least 1'),
  _field('rollout.groups', 0, 'at least 1'),
  _field('rollout.groups', 'many', 'many: wrong type; must be an integer'),
  _field('rollout.groups', None, 'None: wrong type; must be an integer'),
  _field('rollout.groups', 1.5, '1.5: wrong type; must be an integer'),
  _field('lora', True, 'must be set field by field', 'rank'),
  _field('learning_rate', 1, 'no such field', 'optimizer.learning_rate'),
  _field('algorithm.gamma', 1, 'no such field', 'algorithm.discount'),
  Case((TINY, '--config=configs/webshop.py:tiny'), ('another --config',)),
  _field('algorithm.omega', 1, 'algorithm.omega=1: no such field', 'base.py'),
  _field('rollout.groups', 10_000, 'split train has'),
  _field('rollout.episodes_per_group', 1, 'must be at least 2'),
  _field('rollout.max_prompt_tokens', 5, 'the chat template alone'),
  _field('rollout.max_completion_tokens', 0, 'at least 1'),
  _field('rollout.prompt_overflow', 'cut', 'must be one of'),
  _field('rollout.prompt_buckets', (64, 32), 'rising'),
  _field('rollout.prompt_buckets', "('a',)", 'rising positive sizes'),
  _field('rollout.batch_buckets', (), 'rising'),
  _field('rollout.horizon', ((5, 10), (5, 20)), 'rising'),
  _field('rollout.horizon', (5, 10), 'pairs'),
  _field('rollout.horizon', ((-1, 10),), 'iterations of at least 0'),
  _field('tasks.diversity_weight', 0.2, 'has no effect; needs tasks.draw'),
  _field('teacher.data', 'runs/a', 'or must be (empty)'),
  _field('reward.judge.url', 'http://a', 'must be (empty)'),
  _field('rollout.temperature', 0.0, 'at least 0.001; greedy'),
  _field('rollout.temperature', 'nan', 'finite'),
  _field(
    'evaluation.temperature', 1e-9, 'at least 0.001, or 0, which is greedy'
  ),
  _field('rollout.top_p', 1.5, 'at most 1'),
  _field('rollout.top_k', -1, 'must be 0, which is off, or at least 2'),
  _field('rollout.top_k', 1, 'greedy episodes of a group are identical'),
  _field('rollout.min_p', 1.0, 'below 1'),
  _field('rollout.schedule', 'sync', 'must be one of'),
  _field('loss.dual_clip', 1.0, 'above 1'),
  _field('critic.rate_ratio', 5.0, 'gigpo has no critic'),
  _field('env.expert_order', 'bogus', 'must be one of'),
  _field('env.generator.seed', -1, 'non-negative'),
  _field('rollout.weights', 'fp8', 'must be one of'),
  _field('rollout.tensor', -1, 'at least 0'),
  _field('algorithm.name', 'gippo', 'must be one of'),
  _field('algorithm.name', 'my/gippo.py', 'a file, not a module; use gippo'),
  _field('algorithm.norm', 'std', 'must be one of'),
  _field('algorithm.discount', 1.1, 'between 0 and 1'),
  _field('algorithm.step_weight', 'inf', 'finite'),
  _field('algorithm.penalty_scope', 'row', 'episode_stats=rows'),
  _field('loss.kl_weight', -0.1, 'at least 0'),
  _field('loss.clip_epsilon', 2.0, 'above 0, at most 1'),
  _field('loss.clip_epsilon', 0.0, 'above 0'),
  _field('loss.tis_clip', 0.5, 'at least 1'),
  _field('optimizer.learning_rate', 'nan', 'finite'),
  _field('optimizer.b1', 1.0, 'below 1'),
  _field('optimizer.b2', -0.1, 'at least 0'),
  _field('optimizer.weight_decay', -1.0, 'at least 0'),
  _field('optimizer.max_grad_norm', 0.0, 'above 0'),
  _field('optimizer.decay_updates', -1, 'at least 0'),
  _field('learner.microbatch_tokens', 0, 'at least 1'),
  _field('learner.max_skipped_in_row', 0, 'at least 1'),
  _field('lora.rank', -1, 'at least 0'),
  _field('lora.alpha', 16.0, 'has no effect; needs lora.rank'),
  _field('lora.targets', ('q', 'w'), 'must be one or more of'),
  _field('lora.agents', ('a', 'a'), 'must be two or more different names'),
  _field('mesh.tensor', 0, 'at least 1, or -1'),
  _field('mesh.data', -1, 'at most one axis'),
  dataclasses.replace(
    _field('mesh.tensor', 3, 'mesh.', 'device'), devices=True
  ),
  _field('model.dtype', 'float16', 'must be one of'),
  _field('model.attention', 'flash', 'must be one of'),
  _field('pool.num_workers', -1, 'at least 0'),
  _field('pool.step_timeout_secs', 0.0, 'above 0'),
  _field('pool.max_failed_share', 2.0, 'between 0 and 1'),
  _field('pool.max_worker_mib', -1, 'at least 0'),
  _field('evaluation.split', 'test', 'must be one of'),
  _field('evaluation.num_tasks', 10**6, 'or 0 for all'),
  _field('evaluation.every', -1, '0 is never'),
  _field('checkpoint.every', 0, 'at least 1'),
  _field('checkpoint.keep', 0, 'at least 1'),
  _field('env.name', 'alfred', 'must be one of'),
  Case(
    (TINY, '--config.env.name=alfred', '--config.algorithm.name=igpo'),
    ('must be one of',),
  ),
  _field('env.name', 'toy.py', 'toy.py: a file, not a module; use toy and run'),
  _field('loss.name', 'toy.py:loss', 'a file, not a module; use toy and run'),
  _field('env.engine', 'unity', 'must be one of'),
  _field('env.max_steps', 0, 'at least 1'),
  _field('env.max_steps', 10**30, 'out of range'),
  _field('rollout.top_k', 2**31, 'out of range'),
  _field('optimizer.warmup_updates', 2**63, 'out of range'),
  _field('optimizer.eps', 1e-50, 'at least 1e-30'),
  _field('env.generator.receptacles', (9, 2), 'receptacles'),
  _field('sft.model.heads', 3, 'must be an even integer'),
  _field('sft.model.heads', 128, 'must be an even integer'),
  _field('sft.model.kv_heads', 3, 'must divide sft.model.heads=4'),
  Case((TINY, '--config.env.max_step=3'), ('no such field', 'max_steps')),
)

COMMANDS = (
  _flags(expected=('--config: missing', 'try --config=')),
  _flags(
    '--config=configs/none.py', expected=('configs/none.py', 'no such file')
  ),
  _flags('--config=', expected=('--config=: no such file', 'configs/')),
  _flags('--config=README.md', expected=('--config=README.md', 'configs/')),
  _flags('--config=configs/alfworld.py:huge', expected=('huge', 'accepts')),
  _flags('--config=configs/alfworld.py:grpo,ppo', expected=('one algorithm',)),
  _flags('--config', 'configs/alfworld.py:x', expected=('unknown x; accepts',)),
  _flags(
    '--config={dir}/own.py:x',
    expected=('--config=', '/own.py:x: unknown x'),
    prepare=lambda folder: (folder / 'own.py').write_text(_OWN_CONFIG),
  ),
  _flags('--config=configs/alfworld.py:gigpo', expected=('is the default',)),
  _flags('-config=configs/none.py', expected=('--config=configs/none.py: no',)),
  _flags('--learning_rate=1', expected=("'learning_rate'", '--config.FIELD')),
  _flags(TINY, '--wrkdir=x', expected=('wrkdir', 'workdir')),
  _flags(
    TINY,
    '--allow_config_change=maybe',
    expected=('config_change=maybe: wrong type; must be True or False',),
  ),
  _flags(
    '--gather=maybe',
    expected=('--gather=maybe: wrong type; must be True or False',),
    script='sweep',
  ),
  _flags(TINY, '--grace_secs=soon', expected=('grace_secs',)),
  _flags(TINY, '--grace_secs=-1', expected=('grace_secs', 'range')),
  _flags(TINY, '--grace_secs=nan', expected=('grace_secs=nan: must be a',)),
  _flags(TINY, '--workdir=gs://bucket/run', expected=('--workdir', 'folder')),
  _flags(TINY, '--workdir=', expected=('--workdir=: empty', 'folder')),
  _flags(
    TINY,
    f'--workdir={{dir}}/{"x" * 300}',
    expected=('--workdir', 'cannot be written (File name too long)'),
  ),
  _flags(TINY, 'stray', expected=('stray', '--')),
  _flags(
    TINY,
    '--checkpoint={dir}/run',
    expected=('--checkpoint=', 'has no checkpoints/'),
    script='evaluate',
  ),
  _flags(
    TINY,
    '--checkpoint={dir}/run/checkpoints/3',
    expected=('checkpoints/3: does not exist', 'run/checkpoints has none'),
    script='evaluate',
  ),
  _flags(
    TINY,
    '--checkpoint={dir}/earlier/checkpoints/3/',
    expected=('checkpoints/3/: does not exist', '/checkpoints has 0, 12'),
    script='evaluate',
    prepare=lambda folder: [
      (folder / 'earlier' / 'checkpoints' / name).mkdir(parents=True)
      for name in ('12', '0', '3.damaged')
    ],
  ),
  _flags(TINY, expected=('--model, --checkpoint: missing',), script='evaluate'),
  _flags(
    '--config=configs/alfworld.py:tinny', expected=('did you mean tiny?',)
  ),
  _flags(
    '--config=alfworld:tiny', expected=('did you mean configs/alfworld.py?',)
  ),
  _flags(TINY, '--output_dir=out', expected=('did you mean --workdir?',)),
  _flags(TINY, '--max_steps=9', expected=('counts updates', '.num_iterations')),
  _flags(TINY, '--env.max_steps=9', expected=('mean --config.env.max_steps?',)),
  _flags(TINY, '--num_iterations=2', expected=('is --config.learner.epochs;',)),
  _flags(TINY, '--use_kl_loss=True', expected=('--config.loss.kl_weight?',)),
  _field('max_steps', 9, 'no such field', 'counts updates'),
  _flags(TINY, '--repeats=0', expected=('--repeats=0',), script='evaluate'),
  _flags(
    TINY,
    '--model={dir}/none',
    expected=('model.path=', 'no such folder; needs'),
    script='evaluate',
  ),
  _flags('--workdir={dir}', expected=('--sweep: missing',), script='sweep'),
  _flags(
    '--sweep={dir}/none.py',
    '--workdir={dir}',
    expected=('--sweep=', 'no such file'),
    script='sweep',
  ),
  _flags('--at_once=0', expected=('at_once=0', 'positive'), script='sweep'),
  _flags('--port=99999', expected=('port', '65535'), script='view'),
  _flags('--port=x', expected=('port',), script='view'),
  _flags('--wrkdir=x', expected=('wrkdir', 'workdir'), script='view'),
  _flags('stray', expected=('stray', '--'), script='view'),
)


def _model(damage: Callable[[pathlib.Path], object], *expected: str) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    shutil.copytree(WARM_START, folder / 'model')
    damage(folder / 'model')

  flags = (TINY, '--config.model.path={dir}/model')
  return Case(flags, ('model', *expected), prepare)


def _edit(name: str, **changes) -> Callable[[pathlib.Path], object]:
  def damage(model: pathlib.Path) -> None:
    raw = json.loads((model / name).read_text())
    raw = {k: v for k, v in (raw | changes).items() if v is not None}
    (model / name).write_text(json.dumps(raw))

  return damage


def _write(name: str, text: str) -> Callable[[pathlib.Path], object]:
  return lambda folder: (folder / name).write_text(text)


def _rename_to_bin(model: pathlib.Path) -> None:
  (model / 'model.safetensors').rename(model / 'pytorch_model.bin')


def _template(text: str) -> Callable[[pathlib.Path], object]:
  def damage(model: pathlib.Path) -> None:
    (model / 'chat_template.jinja').unlink(missing_ok=True)
    _edit('tokenizer_config.json', chat_template=text)(model)

  return damage


def _remove_template(model: pathlib.Path) -> None:
  (model / 'chat_template.jinja').unlink(missing_ok=True)
  _edit('tokenizer_config.json', chat_template=None)(model)


def _tensor(change: Callable[[dict], object]) -> Callable:
  def damage(model: pathlib.Path) -> None:
    tensors = safetensors.numpy.load_file(model / 'model.safetensors')
    change(tensors)
    safetensors.numpy.save_file(tensors, model / 'model.safetensors')

  return damage


def _unlink(name: str) -> Callable[[pathlib.Path], object]:
  return lambda folder: (folder / name).unlink()


_NORM = 'model.norm.weight'


def _copy_weights(model: pathlib.Path) -> None:
  shutil.copy(model / 'model.safetensors', model / 'copy.safetensors')


MODELS = (
  _model(shutil.rmtree, 'no such folder; needs'),
  _model(_unlink('config.json'), 'no config.json; needs'),
  _model(_write('config.json', '{'), 'config.json', 'not JSON'),
  _model(_write('config.json', '[]'), 'config.json', 'not a JSON object'),
  _model(_edit('config.json', model_type='llama'), 'llama', 'must be qwen2'),
  _model(_edit('config.json', hidden_size=None), 'lacks hidden_size'),
  _model(_edit('config.json', hidden_size='big'), 'hidden_size'),
  _model(_edit('config.json', rope_theta=0), 'rope_theta=0', 'above 1'),
  _model(_edit('config.json', rope_theta='x'), 'rope_theta="x"', 'above 1'),
  _model(_edit('config.json', rms_norm_eps=1.5), 'between 0 and 1'),
  _model(_edit('config.json', num_hidden_layers=7), 'is missing'),
  _model(_edit('config.json', vocab_size=7), 'by config.json'),
  _model(_edit('config.json', use_sliding_window='on'), 'use_sliding_window'),
  _model(_edit('config.json', hidden_act='gelu'), 'only "silu" is supported'),
  _model(
    _edit('config.json', quantization_config={'bits': 4}),
    'quantization_config',
    'only null is supported',
  ),
  _model(
    _edit('config.json', layer_types=['sliding_attention'] * 3), 'layer_types'
  ),
  _model(_edit('config.json', rope_theta=float('inf')), 'Infinity', 'finite'),
  _model(_edit('config.json', num_hidden_layers=10**9), 'and more'),
  _model(
    _edit('config.json', max_position_embeddings=200),
    'rollout.max_prompt_tokens=320',
    'max_position_embeddings=200',
  ),
  _model(_rename_to_bin, 'no *.safetensors files', 'pytorch_model.bin'),
  _model(_write('model.safetensors', 'x' * 99), 'not a readable safetensors'),
  _model(_write('model.safetensors', ''), 'not a readable safetensors'),
  _model(_tensor(lambda t: t.pop(_NORM)), _NORM, 'is missing'),
  _model(_tensor(lambda t: t.update(odd=np.ones(2))), 'odd is unknown'),
  _model(_tensor(lambda t: t.update({_NORM: np.ones(128, int)})), 'is I64'),
  _model(_copy_weights, 'is in copy.safetensors and in model.safetensors'),
  _model(_unlink('tokenizer_config.json'), 'no tokenizer_config.json; needs'),
  _model(_unlink('tokenizer.json'), 'tokenizer'),
  _model(_write('tokenizer.json', '{"a":'), 'tokenizer'),
  _model(_write('tokenizer_config.json', '{'), 'tokenizer'),
  _model(_remove_template, 'no chat template'),
  _model(_template('{% for %}'), 'chat template'),
  _model(_template('{{ "hello" }}'), 'omits the message'),
  _model(_write('generation_config.json', '{"eos_token_id": -1}'), '-1', 'ids'),
  _model(_template('{{ messages[0].nothing.more }}'), 'chat template'),
  # This template would run code if it were not rendered in a sandbox.
  _model(
    _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    'chat template',
  ),
  _model(
    _write('model.safetensors.index.json', '{"weight_map": {"a": "b.bin"}}'),
    'model.safetensors.index.json',
    'b.bin',
  ),
  _model(_write('model.safetensors.index.json', 'x'), 'index.json'),
)


def _data(
  damage: Callable[[pathlib.Path], object], *expected: str, **kw
) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    if kw.get('full', True):
      games.main(['--out', str(folder / 'data'), '--num', '9'])
    damage(folder / 'data')

  flags = (TINY, '--config.env.data_dir={dir}/data')
  return Case(flags, ('env.', *expected), prepare)


def _games(data: pathlib.Path, name: str) -> list[pathlib.Path]:
  return sorted(data.rglob(f'train/**/{name}'))


DATA = (
  _data(lambda data: None, 'no folder json_2.1.1/train', full=False),
  _data(
    lambda data: data.write_text(''), 'no folder json_2.1.1/train', full=False
  ),
  _data(
    lambda data: shutil.rmtree(_games(data, 'game.tw-pddl')[0].parent),
    'has 8 train games, not 9',
  ),
  _data(
    lambda data: _games(data, 'game.tw-pddl')[0].write_text('torn'),
    'not a readable game file',
  ),
  _data(
    lambda data: _games(data, 'traj_data.json')[0].write_text(''),
    'not a trajectory file',
  ),
  _data(
    lambda data: _games(data, 'generated.json')[0].write_text('{'),
    'generated.json',
  ),
)


def _shop(name: str, text: str, *expected: str) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    (folder / 'data').mkdir()
    (folder / 'data' / name).write_text(text)

  flags = (
    '--config=configs/webshop.py:tiny',
    '--config.env.data_dir={dir}/data',
  )
  return Case(flags, ('env.data_dir', *expected), prepare)


SHOPS = (
  _shop('odd', '', 'download'),
  _shop('items_shuffle.json', '{', 'items_shuffle'),
)


def _run(
  prepare: Callable[[pathlib.Path], object], *expected: str, **kw
) -> Case:
  def in_workdir(folder: pathlib.Path) -> None:
    prepare(folder / 'run')

  flags = (TINY, *kw.pop('flags', ()), '--workdir={dir}/run')
  return Case(flags, expected, in_workdir, **kw)


def _write_metrics(run: pathlib.Path) -> None:
  (run / 'metrics.jsonl').write_text('{"iteration": 0}\n')


def _write_model_config(run: pathlib.Path) -> None:
  run.mkdir()
  (run / 'config.json').write_text('{"model_type": "qwen2"}')


def _write_config(text: str) -> Callable[[pathlib.Path], None]:
  def prepare(run: pathlib.Path) -> None:
    run.mkdir()
    (run / 'config.json').write_text(text)
    _write_metrics(run)

  return prepare


def _write_other_config(run: pathlib.Path) -> None:
  run.mkdir()
  config = alfworld.get_config('tiny')
  config.seed, config.algorithm.discount = 1, 0.9
  run_config.save(config, str(run))
  _write_metrics(run)


def _write_damaged_checkpoint(run: pathlib.Path) -> None:
  (run / 'checkpoints' / '4' / 'state').mkdir(parents=True)
  run_config.save(alfworld.get_config('tiny'), str(run))


def _write_file_as_checkpoints(run: pathlib.Path) -> None:
  run.mkdir()
  (run / 'checkpoints').write_text('')


_LOCKS = contextlib.ExitStack()


def _lock_workdir(run: pathlib.Path) -> None:
  run.mkdir()
  _LOCKS.enter_context(files.lock(run))


RUNS = (
  _run(_lock_workdir, '--workdir', 'in use by process', 'on host'),
  _run(_lock_workdir, '--workdir', 'in use by process', script='sft'),
  _run(lambda run: run.write_text(''), '--workdir', 'cannot be written'),
  _run(
    _write_other_config,
    'algorithm.discount=0.95 (was 0.9), seed=0 (was 1)',
    '--allow_config_change',
  ),
  _run(_write_config('{"seed": 0'), 'config.json cannot be read'),
  _run(_write_config('[]'), 'config.json cannot be read'),
  _run(
    _write_config('{}'), 'config.json cannot be read', 'lacks num_iterations'
  ),
  _run(_write_config('{"version": 99}'), 'config.json', 'newer release'),
  _run(_write_file_as_checkpoints, 'checkpoints: is a file', 'folder'),
  _run(
    _write_damaged_checkpoint,
    'all checkpoints are damaged ([4])',
    'another --workdir',
  ),
  _run(
    lambda run: (run / 'policy').mkdir(parents=True),
    '--workdir=',
    'its policy is of another command',
  ),
  _run(
    _write_model_config,
    '--workdir=',
    'its config.json is of another program',
  ),
)


def _write_run(folder: pathlib.Path) -> None:
  _write_config('{"seed": 0}')(folder / 'run')
  shutil.copytree(WARM_START, folder / 'run/policy')


def _unreadable_config(text: str) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    _write_config(text)(folder / 'run')

  return _flags(
    '--workdir={dir}/run',
    expected=('config.json cannot be read', 'restore or delete it'),
    script='view',
    prepare=prepare,
  )


HARNESS = tuple(
  _flags(
    '--config=configs/endpoint.py:smoke',
    '--config.env.tools=False',
    f'--config.model.path={WARM_START}',
    *more,
    expected=('env.name=endpoint', 'use launch/serve.py'),
    script=script,
  )
  for script, *more in (
    ('train',),
    ('sft',),
    ('evaluate', f'--model={WARM_START}'),
  )
)

_ROUNDS = (TINY, '--config.sft.init=', '--config.sft.rounds=1')
SFT = (
  _flags(
    TINY,
    '--config.optimizer.learning_rate=1e-5',
    expected=('no effect on this command; set sft.learning_rate',),
    script='sft',
  ),
  _flags(TINY, '--config.sft.epochs=0', expected=('sft.epochs',), script='sft'),
  _flags(
    TINY,
    '--config.sft.init=bogus',
    expected=('sft.init', 'scratch'),
    script='sft',
  ),
  _flags(
    TINY,
    '--config.lora.rank=4',
    expected=('lora.rank=4', 'must be 0 with sft.init=scratch'),
    script='sft',
  ),
  _flags(
    TINY,
    '--config.sft.learning_rate=nan',
    expected=('sft.learning_rate', 'finite'),
    script='sft',
  ),
  _flags(
    TINY,
    '--config.sft.init=',
    '--config.sft.data={dir}/none',
    expected=('holds no episodes', '--config.episodes.every=1'),
    script='sft',
  ),
  _flags(
    TINY,
    expected=('--workdir', 'another folder'),
    script='sft',
    prepare=lambda folder: _write_damaged_checkpoint(folder / 'run'),
  ),
  _flags(
    TINY,
    expected=('--workdir', 'another folder'),
    script='sft',
    prepare=lambda folder: _write_config('{}')(folder / 'run'),
  ),
  _flags(
    *_ROUNDS,
    expected=('--workdir', 'another folder'),
    script='sft',
    prepare=lambda folder: _write_config('{}')(folder / 'run'),
  ),
  _flags(
    *_ROUNDS,
    '--config.lora.rank=4',
    "--config.lora.agents=('planner','actor')",
    '--config.rollout.weights=adapters',
    '--config.env.name=envs.alfworld.planner',
    expected=('lora.agents=', 'must be () for a warm start'),
    script='sft',
  ),
  _flags(
    TINY,
    '--config.sft.init=',
    '--config.model.path={dir}/run/policy',
    expected=('its policy/ is model.path', 'another folder'),
    script='sft',
    prepare=lambda folder: shutil.copytree(WARM_START, folder / 'run/policy'),
  ),
  _flags(
    TINY,
    '--model={dir}/run',
    expected=('model.path=', 'a folder of a run; must be', 'run/policy'),
    script='evaluate',
    prepare=_write_run,
  ),
  _flags(
    TINY,
    '--config.model.path={dir}/rounds',
    expected=('a folder of a run; must be', 'rounds/round-10/policy'),
    prepare=lambda folder: [
      (folder / f'rounds/round-{n}/policy').mkdir(parents=True) for n in (2, 10)
    ],
  ),
  _unreadable_config('{'),
  _unreadable_config('[]'),
  _flags(
    TINY,
    '--checkpoint={dir}/run',
    expected=('all checkpoints are damaged ([4])',),
    script='evaluate',
    prepare=lambda folder: _write_damaged_checkpoint(folder / 'run'),
  ),
)

# Cases that are refused before a work directory is created.
CLEAN = tuple(c for c in (*FIELDS, *COMMANDS) if not c.devices)
CASES = (*FIELDS, *COMMANDS, *MODELS, *DATA, *SHOPS, *RUNS, *HARNESS, *SFT)


def _run_case(case: Case, folder: pathlib.Path) -> dict:
  """Returns output and resources of a case's command."""
  folder.mkdir()
  case.prepare(folder)
  flags = [flag.replace('{dir}', str(folder)) for flag in case.flags]
  if not any(flag.startswith('--workdir') for flag in flags):
    flags.append(f'--workdir={folder / "run"}')
  used = folder.with_suffix('.json')
  process = preloaded.Process(
    [
      sys.executable,
      'tests/observe.py',
      str(used),
      f'launch/{case.script}.py',
      *flags,
    ]
  )
  out, errors = process.communicate(timeout=300)
  return json.loads(used.read_text()) | {
    'status': process.returncode,
    'out': out,
    'err': errors,
    'left': (folder / 'run').exists(),
  }


def _problem(case: Case, result: dict) -> str:
  """Returns the first difference from the expected result, or ''."""
  if result['status'] != case.status:
    return f'ended with {result["status"]}: {result["out"]}{result["err"]}'
  if len(result['err'].splitlines()) != 1:
    return f'did not print one line: {result["err"]}'
  if missing := [part for part in case.expected if part not in result['err']]:
    return f'did not print {missing}, but {result["err"]}'
  if case in CLEAN and result['left']:
    return 'left a work directory'
  used = {n: result[n] for n in ('arrays', 'workers', 'addresses')}
  if not case.devices:
    used['devices'] = result['devices']
  return f'had used {used}' if any(used.values()) else ''


@pytest.fixture(autouse=True)
def _release_locks():
  """Holds the locks of a case until its command has run."""
  with _LOCKS:
    yield


@pytest.mark.parametrize(
  'case', CASES, ids=lambda case: ' '.join(map(str, case.flags))[-80:]
)
def test_invalid_input_is_refused_in_one_line(tmp_path, case):
  assert not _problem(case, _run_case(case, tmp_path / 'case'))
