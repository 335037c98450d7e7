"""Wrong input by the table, as a user gives it: one line each, and soon.

Before any device memory or worker process is taken, and with no network.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import safetensors.numpy

from configs import alfworld
from envs.alfworld import games
from gigpo_jax import run_config, train
from gigpo_jax.runtime import files

PROJECT = pathlib.Path(train.__file__).parents[1]
WARM_START = PROJECT / 'configs' / 'warm_starts' / 'alfworld_tiny'
TINY = '--config=configs/alfworld.py:tiny'
LIMIT_SECS = 15


@dataclasses.dataclass(frozen=True)
class Case:
  """A command and what it has to say.

  Attributes:
    flags: of the command; {dir} is a folder of its own.
    said: parts of the line: what is wrong, what to do.
    prepare: fills the folder.
    script: of launch/.
    status: of the process.
    devices: whether it is known only once they are.
  """

  flags: tuple[str, ...]
  said: tuple[str, ...]
  prepare: Callable[[pathlib.Path], object] = lambda folder: None
  script: str = 'train'
  status: int = 2
  devices: bool = False


def _field(name: str, value: object, *said: str) -> Case:
  return Case((TINY, f'--config.{name}={value}'), (name, *said))


def _flags(*flags: str, said: tuple[str, ...], **kwargs) -> Case:
  return Case(flags, said, **kwargs)


FIELDS = (
  _field('seed', -1, 'non-negative'),
  _field('seed', 'x', 'seed'),
  Case((TINY, '--config.sed=1'), ('sed',)),
  _field('num_iterations', 0, 'at least 1'),
  _field('rollout.groups', 0, 'at least 1'),
  _field('rollout.groups', 'many', 'many'),
  _field('rollout.groups', 1.5, '1.5'),
  _field('rollout.groups', 10**6, 'split train has'),
  _field('rollout.episodes_per_group', 1, 'must be at least 2'),
  _field('rollout.max_prompt_tokens', 5, 'the chat template alone'),
  _field('rollout.max_completion_tokens', 0, 'at least 1'),
  _field('rollout.prompt_overflow', 'cut', 'must be one of'),
  _field('rollout.prompt_buckets', (64, 32), 'rising'),
  _field('rollout.prompt_buckets', "('a',)", 'rising positive sizes'),
  _field('rollout.batch_buckets', (), 'rising'),
  _field('rollout.horizon', ((5, 10), (5, 20)), 'rising'),
  _field('rollout.horizon', (5, 10), 'pairs'),
  _field('rollout.temperature', 0.0, 'above 0'),
  _field('rollout.temperature', 'nan', 'finite'),
  _field('rollout.top_p', 1.5, 'at most 1'),
  _field('rollout.top_k', -1, '0 is off'),
  _field('rollout.schedule', 'sync', 'must be one of'),
  _field('loss.dual_clip', 1.0, 'above 1'),
  _field('critic.rate_ratio', 5.0, 'gigpo has no critic'),
  _field('env.expert_order', 'bogus', 'must be one of'),
  _field('env.generator.seed', -1, 'non-negative'),
  _field('rollout.weights', 'fp8', 'must be one of'),
  _field('rollout.tensor', -1, 'at least 0'),
  _field('algorithm.name', 'gippo', 'must be one of'),
  _field('algorithm.norm', 'std', 'must be one of'),
  _field('algorithm.discount', 1.1, 'between 0 and 1'),
  _field('algorithm.step_weight', 'inf', 'finite'),
  _field('algorithm.penalty_scope', 'row', 'episode_stats=rows'),
  _field('loss.kl_weight', -0.1, 'at least 0'),
  _field('loss.clip_epsilon', 2.0, 'between 0 and 1'),
  _field('loss.tis_clip', 0.0, 'above 0'),
  _field('optimizer.learning_rate', 'nan', 'finite'),
  _field('optimizer.b1', 1.0, 'below 1'),
  _field('optimizer.b2', -0.1, 'at least 0'),
  _field('optimizer.weight_decay', -1.0, 'at least 0'),
  _field('optimizer.max_grad_norm', 0.0, 'above 0'),
  _field('optimizer.decay_updates', -1, 'at least 0'),
  _field('learner.microbatch_rows', 1024, 'must divide it'),
  _field('learner.max_skipped_in_row', 0, 'at least 1'),
  _field('lora.rank', -1, 'at least 0'),
  _field('lora.targets', ('q', 'w'), 'must be one or more of'),
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
  _field('env.engine', 'unity', 'must be one of'),
  _field('env.max_steps', 0, 'at least 1'),
  _field('env.generator.receptacles', (9, 2), 'receptacles'),
  _field('sft.model.heads', 3, 'must be an even integer'),
  _field('sft.model.heads', 128, 'must be an even integer'),
  _field('sft.model.kv_heads', 3, 'must divide sft.model.heads=4'),
  Case((TINY, '--config.env.max_step=3'), ('no such field', 'max_steps')),
)

COMMANDS = (
  _flags(said=('--config: missing', 'try --config=')),
  _flags('--config=configs/none.py', said=('configs/none.py', 'no such file')),
  _flags('--config=README.md', said=('--config=README.md', 'configs/')),
  _flags('--config=configs/alfworld.py:huge', said=('huge', 'accepts')),
  _flags('--config=configs/alfworld.py:grpo,ppo', said=('one algorithm',)),
  _flags(TINY, '--wrkdir=x', said=('wrkdir', 'workdir')),
  _flags(TINY, '--grace_secs=soon', said=('grace_secs',)),
  _flags(TINY, '--grace_secs=-1', said=('grace_secs', 'range')),
  _flags(TINY, '--workdir=gs://bucket/run', said=('--workdir', 'folder')),
  _flags(TINY, 'stray', said=('stray', '--')),
  _flags(
    TINY,
    '--checkpoint={dir}/run',
    said=('--checkpoint=', 'has no checkpoints/'),
    script='evaluate',
  ),
  _flags(
    TINY,
    '--checkpoint={dir}/run/checkpoints/3',
    said=('checkpoints/3: does not exist',),
    script='evaluate',
  ),
  _flags(TINY, said=('--model, --checkpoint: missing',), script='evaluate'),
  _flags('--config=configs/alfworld.py:tinny', said=('did you mean tiny?',)),
  _flags(TINY, '--repeats=0', said=('--repeats=0',), script='evaluate'),
  _flags(
    TINY,
    '--model={dir}/none',
    said=('model.path=', 'no config.json; needs'),
    script='evaluate',
  ),
  _flags('--workdir={dir}', said=('--sweep: missing',), script='sweep'),
  _flags(
    '--sweep={dir}/none.py',
    '--workdir={dir}',
    said=('--sweep=', 'no such file'),
    script='sweep',
  ),
  _flags('--at_once=0', said=('at_once=0', 'positive'), script='sweep'),
  _flags('--port=99999', said=('port', '65535'), script='view'),
  _flags('--port=x', said=('port',), script='view'),
  _flags('--wrkdir=x', said=('wrkdir', 'workdir'), script='view'),
  _flags('stray', said=('stray', '--'), script='view'),
)


def _model(spoil: Callable[[pathlib.Path], object], *said: str) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    shutil.copytree(WARM_START, folder / 'model')
    spoil(folder / 'model')

  flags = (TINY, '--config.model.path={dir}/model')
  return Case(flags, ('model', *said), prepare)


def _edit(name: str, **changes) -> Callable[[pathlib.Path], object]:
  def spoil(model: pathlib.Path) -> None:
    raw = json.loads((model / name).read_text())
    raw = {k: v for k, v in (raw | changes).items() if v is not None}
    (model / name).write_text(json.dumps(raw))

  return spoil


def _write(name: str, text: str) -> Callable[[pathlib.Path], object]:
  return lambda folder: (folder / name).write_text(text)


def _pickled(model: pathlib.Path) -> None:
  (model / 'model.safetensors').rename(model / 'pytorch_model.bin')


def _template(text: str) -> Callable[[pathlib.Path], object]:
  def spoil(model: pathlib.Path) -> None:
    (model / 'chat_template.jinja').unlink(missing_ok=True)
    _edit('tokenizer_config.json', chat_template=text)(model)

  return spoil


def _no_template(model: pathlib.Path) -> None:
  (model / 'chat_template.jinja').unlink(missing_ok=True)
  _edit('tokenizer_config.json', chat_template=None)(model)


def _tensor(change: Callable[[dict], object]) -> Callable:
  def spoil(model: pathlib.Path) -> None:
    tensors = safetensors.numpy.load_file(model / 'model.safetensors')
    change(tensors)
    safetensors.numpy.save_file(tensors, model / 'model.safetensors')

  return spoil


def _unlink(name: str) -> Callable[[pathlib.Path], object]:
  return lambda folder: (folder / name).unlink()


_NORM = 'model.norm.weight'


def _copied(model: pathlib.Path) -> None:
  shutil.copy(model / 'model.safetensors', model / 'copy.safetensors')


MODELS = (
  _model(shutil.rmtree, 'no config.json; needs'),
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
  _model(_edit('config.json', use_sliding_window=True), 'use_sliding_window'),
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
  _model(_pickled, 'no *.safetensors files', 'pytorch_model.bin'),
  _model(_write('model.safetensors', 'x' * 99), 'not a readable safetensors'),
  _model(_write('model.safetensors', ''), 'not a readable safetensors'),
  _model(_tensor(lambda t: t.pop(_NORM)), _NORM, 'is missing'),
  _model(_tensor(lambda t: t.update(odd=np.ones(2))), 'odd is unknown'),
  _model(_tensor(lambda t: t.update({_NORM: np.ones(128, int)})), 'is I64'),
  _model(_copied, 'is in copy.safetensors and in model.safetensors'),
  _model(_unlink('tokenizer_config.json'), 'no tokenizer_config.json; needs'),
  _model(_unlink('tokenizer.json'), 'tokenizer'),
  _model(_write('tokenizer.json', '{"a":'), 'tokenizer'),
  _model(_write('tokenizer_config.json', '{'), 'tokenizer'),
  _model(_no_template, 'no chat template'),
  _model(_template('{% for %}'), 'chat template'),
  _model(_template('{{ "hello" }}'), 'leaves out the message'),
  _model(_write('generation_config.json', '{"eos_token_id": -1}'), '-1', 'ids'),
  _model(_template('{{ messages[0].nothing.more }}'), 'chat template'),
  # What would run a program, if templates were not rendered in a sandbox.
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


def _data(spoil: Callable[[pathlib.Path], object], *said: str, **kw) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    if kw.get('full', True):
      games.main(['--out', str(folder / 'data'), '--num', '9'])
    spoil(folder / 'data')

  flags = (TINY, '--config.env.data_dir={dir}/data')
  return Case(flags, ('env.', *said), prepare)


def _games(data: pathlib.Path, name: str) -> list[pathlib.Path]:
  return sorted(data.rglob(f'train/**/{name}'))


DATA = (
  _data(lambda data: None, 'no json_2.1.1/train folder', full=False),
  _data(lambda data: data.write_text(''), 'no json_2.1.1/train', full=False),
  _data(
    lambda data: shutil.rmtree(_games(data, 'game.tw-pddl')[0].parent),
    '8 train games there, not 9',
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


def _shop(name: str, text: str, *said: str) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    (folder / 'data').mkdir()
    (folder / 'data' / name).write_text(text)

  flags = (
    '--config=configs/webshop.py:tiny',
    '--config.env.data_dir={dir}/data',
  )
  return Case(flags, ('env.data_dir', *said), prepare)


SHOPS = (
  _shop('odd', '', 'download'),
  _shop('items_shuffle.json', '{', 'items_shuffle'),
)


def _run(prepare: Callable[[pathlib.Path], object], *said: str, **kw) -> Case:
  def in_workdir(folder: pathlib.Path) -> None:
    prepare(folder / 'run')

  flags = (TINY, *kw.pop('flags', ()), '--workdir={dir}/run')
  return Case(flags, said, in_workdir, **kw)


def _begun(text: str) -> Callable[[pathlib.Path], None]:
  def prepare(run: pathlib.Path) -> None:
    run.mkdir()
    (run / 'config.json').write_text(text)

  return prepare


def _other(run: pathlib.Path) -> None:
  run.mkdir()
  config = alfworld.get_config('tiny')
  config.seed, config.algorithm.discount = 1, 0.9
  run_config.save(config, str(run))


def _damaged(run: pathlib.Path) -> None:
  (run / 'checkpoints' / '4' / 'state').mkdir(parents=True)
  run_config.save(alfworld.get_config('tiny'), str(run))


def _in_the_way(run: pathlib.Path) -> None:
  run.mkdir()
  (run / 'checkpoints').write_text('')


# Until all commands have run.
_LOCKS = contextlib.ExitStack()


def _in_use(run: pathlib.Path) -> None:
  run.mkdir()
  _LOCKS.enter_context(files.lock(run))


RUNS = (
  _run(_in_use, '--workdir', 'in use by process', 'on host'),
  _run(_in_use, '--workdir', 'in use by process', script='sft'),
  _run(lambda run: run.write_text(''), '--workdir', 'cannot be written'),
  _run(
    _other,
    'algorithm.discount=0.95 (was 0.9), seed=0 (was 1)',
    '--allow_config_change',
  ),
  _run(_begun('{"seed": 0'), 'config.json cannot be read'),
  _run(_begun('[]'), 'config.json cannot be read'),
  _run(_begun('{}'), 'config.json cannot be read', 'lacks num_iterations'),
  _run(_begun('{"version": 99}'), 'config.json', 'newer release'),
  _run(_in_the_way, 'checkpoints: is a file', 'folder'),
  _run(_damaged, 'all checkpoints are damaged ([4])', 'another --workdir'),
)


def _unreadable(text: str) -> Case:
  def prepare(folder: pathlib.Path) -> None:
    _begun(text)(folder / 'run')
    (folder / 'run' / 'metrics.jsonl').write_text('{"iteration": 0}\n')

  return _flags(
    '--workdir={dir}/run',
    said=('config.json cannot be read', 'restore or delete it'),
    script='view',
    prepare=prepare,
  )


SFT = (
  _flags(TINY, '--config.sft.epochs=0', said=('sft.epochs',), script='sft'),
  _flags(
    TINY, '--config.sft.init=bogus', said=('sft.init', 'scratch'), script='sft'
  ),
  _flags(
    TINY,
    '--config.sft.learning_rate=nan',
    said=('sft.learning_rate', 'finite'),
    script='sft',
  ),
  _flags(
    TINY,
    '--config.sft.init=',
    '--config.sft.data={dir}/none',
    said=('holds no episodes', '--config.episodes.every=1'),
    script='sft',
  ),
  _flags(
    TINY,
    said=('--workdir', 'another folder'),
    script='sft',
    prepare=lambda folder: _damaged(folder / 'run'),
  ),
  _flags(
    TINY,
    said=('--workdir', 'another folder'),
    script='sft',
    prepare=lambda folder: _begun('{}')(folder / 'run'),
  ),
  _unreadable('{'),
  _unreadable('[]'),
  _flags(
    TINY,
    '--checkpoint={dir}/run',
    said=('all checkpoints are damaged ([4])',),
    script='evaluate',
    prepare=lambda folder: _damaged(folder / 'run'),
  ),
)

# Refused before a work directory is made.
CLEAN = tuple(c for c in (*FIELDS, *COMMANDS) if not c.devices)
CASES = (*FIELDS, *COMMANDS, *MODELS, *DATA, *SHOPS, *RUNS, *SFT)


def _told(tmp_path: pathlib.Path) -> tuple[float, list[dict]]:
  """Returns what all commands said, and what their processes had taken."""
  asked = []
  for number, case in enumerate(CASES):
    folder = tmp_path / str(number)
    folder.mkdir()
    case.prepare(folder)
    flags = [flag.replace('{dir}', str(folder)) for flag in case.flags]
    if not any(flag.startswith('--workdir') for flag in flags):
      flags.append(f'--workdir={folder / "run"}')
    asked.append((f'launch/{case.script}.py', flags, {}))
  done = subprocess.run(
    [sys.executable, 'tests/preloaded.py'],
    input=json.dumps(asked),
    cwd=PROJECT,
    capture_output=True,
    text=True,
    check=True,
  )
  _LOCKS.close()
  imports, *told = map(json.loads, done.stdout.splitlines())
  for number, found in enumerate(told):
    found['left'] = (tmp_path / str(number) / 'run').exists()
  return imports, told


def _wrong(case: Case, found: dict, imports: float) -> str:
  """Returns what is not as it should be; '' if all is."""
  if found['status'] != case.status:
    return f'ended with {found["status"]}: {found["out"]}{found["err"]}'
  if len(found['err'].splitlines()) != 1:
    return f'did not say one line: {found["err"]}'
  if missing := [part for part in case.said if part not in found['err']]:
    return f'did not say {missing}, but {found["err"]}'
  if case in CLEAN and found['left']:
    return 'left a work directory'
  if imports + found['secs'] > LIMIT_SECS:
    return f'took {imports:.1f} and {found["secs"]:.1f} seconds'
  taken = {n: found[n] for n in ('arrays', 'workers', 'addresses')}
  if not case.devices:
    taken['devices'] = found['devices']
  return f'had taken {taken}' if any(taken.values()) else ''


def test_wrong_input_is_refused_in_one_line(tmp_path):
  # One test, for one process imports what all of them need.
  imports, told = _told(tmp_path)
  assert len(told) == len(CASES) >= 60  # noqa: PLR2004
  problems = [
    f'{" ".join(case.flags)}: {wrong}'
    for case, found in zip(CASES, told, strict=True)
    if (wrong := _wrong(case, found, imports))
  ]
  assert not problems, '\n'.join(problems)
