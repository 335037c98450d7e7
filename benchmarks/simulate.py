"""Simulate an iteration of training on an accelerator, from a table of costs.

    python benchmarks/simulate.py --setting 1.5b-h100
    python benchmarks/simulate.py --setting 1.5b-2xh100 --packed --ragged
    python benchmarks/simulate.py --what targets

Rollouts run the code of gigpo_jax.rollout and gigpo_jax.sampler on a virtual
device (virtual_device.py) whose programs take the time of device_costs.py.
Updates are sums over the microbatches of the simulated rows. Every printed time
is simulated. `--costs FILE` takes rates that were measured on a device.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import device_costs
import forced
import numpy as np
import simulated_update
import virtual_device

from envs import base
from gigpo_jax import rollout, sampler, trajectory
from gigpo_jax.models import published
from gigpo_jax.runtime import distributed

_EVALUATION = 10**6  # First index of the evaluation tasks.


@dataclasses.dataclass(frozen=True)
class Workload:
  """Episodes of an iteration, and their lengths.

  Attributes:
    groups: groups of an iteration.
    members: episodes of a group.
    evaluation_tasks: episodes of an evaluation; ALFWorld's valid_seen has 140.
    evaluation_every: iterations between two evaluations.
    lengths: turns, prompt tokens and response tokens.
  """

  groups: int = 16
  members: int = 8
  evaluation_tasks: int = 140
  evaluation_every: int = 5
  lengths: forced.Lengths = forced.Lengths()

  def training(self) -> list[base.Task]:
    """Returns a task per episode; those of a group are consecutive."""
    return [base.Task('train', n) for n in range(self.groups * self.members)]

  def training_parts(self, limit: int) -> list[base.Task]:
    """Returns a task per episode that has turns in an iteration.

    Args:
      limit: turns of an episode in an iteration; 0: all. Episodes that paused
        in earlier iterations come first; see `part` for their indices.
    """
    if not limit:
      return self.training()
    count = self.groups * self.members
    ages = range(-(-self.lengths.max_turns // limit))
    return [
      base.Task('train' if n < count else 'continued', n)
      for n in range(count * len(ages))[::-1]
      if self.part(n, limit)
    ]

  def part(self, task: int, limit: int) -> int:
    """Returns the turns of an episode in this iteration.

    Args:
      task: index of its task: those of the previous iteration follow those of
        this one, and so on.
      limit: turns of an episode in an iteration; 0: all.
    """
    turns = self.lengths.turns(task, 0)
    if not limit or task >= _EVALUATION:
      return turns
    played = limit * (task // (self.groups * self.members))
    return max(0, min(turns - played, limit))

  def evaluation(self) -> list[base.Task]:
    """Returns the evaluation tasks, which differ from those of training."""
    count = self.evaluation_tasks
    return [base.Task('evaluation', _EVALUATION + n) for n in range(count)]


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model on devices.

  Attributes:
    model: name in `published.SHAPES`.
    device: name in `device_costs.DEVICES`.
    devices: number of devices.
    hosts: number of hosts, each with its share of the devices.
    tensor: devices of a copy of the model in the sampler.
  """

  model: str
  device: str
  devices: int = 1
  hosts: int = 1
  tensor: int = 1


SETTINGS = {
  '1.5b-h100': Setting('Qwen2.5-1.5B', 'h100'),
  '1.5b-2xh100': Setting('Qwen2.5-1.5B', 'h100', 2),
  '1.5b-8xh100': Setting('Qwen2.5-1.5B', 'h100', 8),
  '7b-8xh100': Setting('Qwen2.5-7B', 'h100', 8),
  '1.5b-v5e-16': Setting('Qwen2.5-1.5B', 'v5e', 16, hosts=4),
  '7b-v5e-16': Setting('Qwen2.5-7B', 'v5e', 16, hosts=4, tensor=4),
  '7b-v5p-8': Setting('Qwen2.5-7B', 'v5p', 4),
}


@dataclasses.dataclass(frozen=True)
class Options(simulated_update.Options):
  """What can be changed; the defaults are the state before CHANGES.

  See also the options of updates.

  Attributes:
    row_buckets: `rollout.batch_buckets`, ascending; the last is the slots of a
      host.
    prompt_buckets: `rollout.prompt_buckets`.
    chunk: `rollout.decode_tokens`.
    tokens_per_step: tokens that a decoding step adds to a completion.
    evaluation_inside: whether evaluation episodes share the training rollout.
    turns_per_iteration: turns after which an episode pauses and continues in
      the next iteration; 0: none pauses. A rollout then has episodes of several
      iterations, in their steady state.
    host: seconds of the host.
  """

  row_buckets: tuple[int, ...] = (32, 128)
  prompt_buckets: tuple[int, ...] = (512, 1024, 2048)
  chunk: int = 8
  tokens_per_step: float = 1.0
  evaluation_inside: bool = False
  turns_per_iteration: int = 0
  host: virtual_device.HostCosts = virtual_device.HostCosts(
    chunk_secs=0.8e-3, slot_secs=4e-6, turn_secs=0.35e-3, env_secs=0.3e-3
  )


@dataclasses.dataclass(frozen=True)
class RolloutTimes:
  """A simulated rollout.

  Attributes:
    secs: its duration.
    device_secs: time of the device by program.
    stats: counters of the sampler, summed over hosts.
    steps: decoding steps, of the host with the most.
    lengths: (prompt, response) tokens of each row.
  """

  secs: float
  device_secs: dict[str, float]
  stats: sampler.Stats
  lengths: np.ndarray

  @property
  def occupancy(self) -> float:
    """Returns the share of slots and steps that produced a token."""
    return self.stats.decode_tokens / self.stats.slot_steps


def simulate_rollout(
  setting: Setting,
  device: device_costs.Device,
  options: Options,
  work: Workload,
  tasks: Sequence[base.Task],
) -> RolloutTimes:
  """Returns a rollout of these episodes; its time is the slowest host's.

  Args:
    setting: model and devices.
    device: rates of a device.
    options: sizes and choices.
    work: lengths of the episodes.
    tasks: a task per episode.
  """
  parts = [
    _host_rollout(
      setting, device, options, work, host_share(tasks, n, setting.hosts)
    )
    for n in range(setting.hosts)
  ]
  slowest = max(parts, key=lambda part: part.secs)
  names = ('prefill_tokens', 'decode_tokens', 'slot_steps', 'padded_tokens')
  stats = sampler.Stats(
    **{n: sum(getattr(part.stats, n) for part in parts) for n in names}
  )
  lengths = np.concatenate([part.lengths for part in parts])
  return dataclasses.replace(slowest, stats=stats, lengths=lengths)


def host_share(
  tasks: Sequence[base.Task], host: int, hosts: int
) -> list[base.Task]:
  """Returns the tasks of a host: an equal part of those of each split."""
  share = []
  for split in dict.fromkeys(task.split for task in tasks):
    same = [task for task in tasks if task.split == split]
    share += [same[n] for n in distributed.equal_slice(len(same), host, hosts)]
  return share


def _host_rollout(
  setting: Setting,
  device: device_costs.Device,
  options: Options,
  work: Workload,
  tasks: Sequence[base.Task],
) -> RolloutTimes:
  """Runs the runner and the sampler of one host in virtual time."""
  clock, limit = virtual_device.Clock(), options.turns_per_iteration
  copies = setting.devices // setting.hosts // setting.tensor
  with virtual_device.installed(
    clock,
    _costs(setting, device, options, copies),
    copies=copies,
    tokens_per_step=options.tokens_per_step,
    ends_early=not setting.device.startswith('h'),
  ):
    engine = virtual_device.make_sampler(
      prompt_buckets=options.prompt_buckets,
      batch_buckets=options.row_buckets,
      max_completion_tokens=options.max_completion,
      decode_tokens=options.chunk,
    )
    envs = len(tasks)
    if not options.evaluation_inside:
      # A separate evaluation has the environments of the training episodes.
      envs = -(-len(work.training_parts(limit)) // setting.hosts)
    runner = make_runner(clock, engine, options, work, envs)
    trajectories = runner.run(
      {},
      tasks,
      episodes_per_group=1,
      stream=(rollout.TRAIN, 0),
      sampling=sampler.Sampling(),
      task_type=str,
    )
  clock.wait(clock.free)
  return RolloutTimes(
    clock.now, dict(clock.secs), runner.stats, row_lengths(trajectories)
  )


def make_runner(
  clock: virtual_device.Clock,
  engine: sampler.Sampler,
  options: Options,
  work: Workload,
  num_envs: int,
) -> rollout.EpisodeRunner:
  """Returns a runner of episodes of forced lengths in virtual time."""
  lengths = work.lengths
  pool = virtual_device.VirtualPool(clock, options.host, num_envs, work.members)
  return rollout.EpisodeRunner(
    forced.Pool(
      pool,
      lambda task, member: work.part(task, options.turns_per_iteration),
    ),
    forced.Sampler(engine, lengths.response),
    forced.Tokenizer(virtual_device.VirtualTokenizer(), lengths.prompt),
    options.prompt_buckets[-1],
    'error',
  )


def row_lengths(trajectories: list[trajectory.Trajectory]) -> np.ndarray:
  """Returns (prompt, response) tokens of each row of training episodes."""
  lengths = [
    (len(step.prompt_ids), len(step.completion_ids))
    for t in trajectories
    if t.task.split != 'evaluation'
    for step in t.steps
  ]
  return np.array(lengths, int).reshape(-1, 2)


def _costs(
  setting: Setting,
  device: device_costs.Device,
  options: Options,
  copies: int,
) -> virtual_device.Costs:
  """Returns the seconds of the sampler's programs."""
  model, kernels = published.SHAPES[setting.model], options.kernels
  sizes = {'tensor': setting.tensor, 'kernels': kernels}

  def decode(steps: int, rows: int, length: int, used: float) -> float:
    positions = used if kernels.ragged else rows * length
    step = device_costs.decode_secs(
      device, model, rows=rows / copies, positions=positions / copies, **sizes
    )
    return steps * step + device.program_secs

  def prefill(rows: int, length: int) -> float:
    return device_costs.prefill_secs(
      device, model, rows=rows / copies, length=length, **sizes
    )

  def copy(rows: int, length: int) -> float:
    moved = rows * length * device_costs.cache_numbers(model)
    moved *= 2 * kernels.cache_bytes / copies / setting.tensor
    return moved / device.copy_rate + device.program_secs

  return virtual_device.Costs(prefill, decode, copy, options.host)


def roofline_secs(
  setting: Setting,
  device: device_costs.Device,
  work: Workload,
  lengths: np.ndarray,
) -> float:
  """Returns the seconds of an iteration at the rates of the device.

  No padding, no overhead, all slots in use; 8 operations per parameter and
  token for update and reference log-probs.

  Args:
    setting: model and devices.
    device: rates of a device.
    work: lengths of the episodes.
    lengths: (prompt, response) tokens of each row.
  """
  model = published.SHAPES[setting.model]
  prompt, response = lengths.mean(axis=0)
  slots = work.groups * work.members
  flops = functools.partial(device_costs.forward_flops, model)
  prefill = flops(lengths[:, 0].sum(), prompt, 0)
  update = 4 * flops(lengths.sum(), prompt + response, lengths[:, 1].sum())
  copies = setting.devices / setting.tensor
  cached = slots / copies * (prompt + response / 2)
  weights = device_costs.layer_parameters(model)
  weights += device_costs.head_parameters(model)
  step = (
    (2 * (weights + cached * device_costs.cache_numbers(model)))
    / setting.tensor
    / device.copy_rate
  )
  decode = lengths[:, 1].sum() / slots * step
  rate = setting.devices * device.matmul_rate
  return (prefill + update) / rate + decode


@dataclasses.dataclass(frozen=True)
class Iteration:
  """A simulated iteration; see `RolloutTimes` and `simulated_update`.

  Attributes:
    rollout: the training rollout.
    evaluation_secs: evaluation, per iteration.
    update: log-probs and updates.
    roofline_secs: see `roofline_secs`.
  """

  rollout: RolloutTimes
  evaluation_secs: float
  update: simulated_update.UpdateTimes
  roofline_secs: float

  @property
  def secs(self) -> tuple[float, float]:
    """Returns the seconds if all exchange overlaps, and if none does."""
    update = self.update
    known = self.rollout.secs + self.evaluation_secs
    computing = update.log_prob_secs + update.update_secs
    return (
      known + max(computing, update.exchange_secs),
      known + computing + update.exchange_secs,
    )


def simulate(
  setting: Setting,
  options: Options = Options(),
  work: Workload = Workload(),
  device: device_costs.Device | None = None,
) -> Iteration:
  """Returns a simulated iteration."""
  device = device or device_costs.DEVICES[setting.device]
  run = functools.partial(simulate_rollout, setting, device, options, work)
  training = run(work.training_parts(options.turns_per_iteration))
  evaluation = 0.0
  if work.evaluation_tasks and work.evaluation_every:
    if options.evaluation_inside:
      # Training episodes start first.
      parts = work.training_parts(options.turns_per_iteration)
      evaluation = run(parts + work.evaluation()).secs - training.secs
    else:
      evaluation = run(work.evaluation()).secs
    evaluation /= work.evaluation_every
  return Iteration(
    training,
    evaluation,
    simulated_update.simulate(
      device,
      published.SHAPES[setting.model],
      options,
      training.lengths,
      setting.devices,
    ),
    roofline_secs(setting, device, work, training.lengths),
  )


# Seconds of an iteration to reach.
TARGETS = {
  '1.5b-h100': 120,
  '1.5b-2xh100': 65,
  '7b-v5e-16': 200,
  '7b-8xh100': 110,
}

# Changes in the order in which they are added; fields of `Kernels` are nested.
CHANGES: dict[str, dict[str, Any]] = {
  'packed updates': {'packed': True},
  "no recomputation; the sampler's log-probs": {
    'kernels': {'recompute': False},
    'forward_passes': 1,
  },
  'fused products in decoding': {'kernels': {'layer_scale': 0.6}},
  'decoding reads used positions only': {'kernels': {'ragged': True}},
  'evaluation inside the rollout; finer buckets': {
    'evaluation_inside': True,
    'row_buckets': (32, 64, 128),
    'prompt_buckets': (768, 1024, 2048),
  },
  'episodes pause after 20 turns': {'turns_per_iteration': 20},
}


def change(options: Options, fields: dict[str, Any]) -> Options:
  """Returns options with other fields; `kernels` is a dict of its fields."""
  fields = dict(fields)
  kernels = dataclasses.replace(options.kernels, **fields.pop('kernels', {}))
  return dataclasses.replace(options, kernels=kernels, **fields)


def _range(low: float, high: float) -> str:
  """Returns 'low-high', or one number if they are equal."""
  low, high = round(low), round(high)
  return f'{low}' if low == high else f'{low}-{high}'


def print_parts(names: Sequence[str], run: Callable[[str], Iteration]) -> None:
  """Prints a table with the parts of an iteration of each setting."""
  print(
    '| case | limit | prefill | decode | rollout | slots | eval | log-probs '
    '| update | exchange | padding | total | share |'
  )
  print('|---' * 13 + '|')
  for name in names:
    result = run(name)
    played, update = result.rollout, result.update
    low, high = result.secs
    shares = _range(
      100 * result.roofline_secs / high, 100 * result.roofline_secs / low
    )
    print(
      f'| {name} | {result.roofline_secs:.0f} '
      f'| {played.device_secs["prefill"]:.0f} '
      f'| {played.device_secs["decode"]:.0f} | {played.secs:.0f} '
      f'| {played.occupancy:.0%} | {result.evaluation_secs:.0f} '
      f'| {update.log_prob_secs:.0f} | {update.update_secs:.0f} '
      f'| {update.exchange_secs:.0f} | {update.padding:.0%} '
      f'| {_range(low, high)} | {shares} % |',
      flush=True,
    )


def print_targets(
  options: Options, device: device_costs.Device | None = None
) -> None:
  """Prints iterations as changes are added, next to the targets."""
  print('| seconds of an iteration | ' + ' | '.join(TARGETS) + ' |')
  print('|---' * (len(TARGETS) + 1) + '|')
  print('| target | ' + ' | '.join(map(str, TARGETS.values())) + ' |')
  for name, fields in ({'today': {}} | CHANGES).items():
    options = change(options, fields)
    cells = []
    for setting, target in TARGETS.items():
      low, high = simulate(SETTINGS[setting], options, device=device).secs
      text = _range(low, high)
      cells.append(f'**{text}**' if high <= target else text)
    row = ' | '.join([name if name == 'today' else f'+ {name}', *cells])
    print(f'| {row} |', flush=True)


def _sizes(text: str) -> tuple[int, ...]:
  return tuple(int(size) for size in text.split(','))


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=('parts', 'targets'), default='parts')
  parser.add_argument(
    '--setting', choices=SETTINGS, nargs='+', default=list(SETTINGS)
  )
  parser.add_argument('--costs', help='JSON file with rates of a device')
  default = Options()
  for name in ('row_buckets', 'prompt_buckets', 'length_buckets'):
    parser.add_argument(
      f'--{name}', type=_sizes, default=getattr(default, name)
    )
  for name in (
    'chunk',
    'microbatch_rows',
    'sequence_tokens',
    'forward_passes',
    'turns_per_iteration',
  ):
    parser.add_argument(f'--{name}', type=int, default=getattr(default, name))
  parser.add_argument('--tokens_per_step', type=float, default=1.0)
  for name in ('packed', 'evaluation_inside'):
    parser.add_argument(f'--{name}', action='store_true')
  for name in ('weight_bytes', 'cache_bytes', 'layer_scale'):
    value = getattr(default.kernels, name)
    parser.add_argument(f'--{name}', type=float, default=value)
  parser.add_argument('--draft', type=int, default=0)
  parser.add_argument('--ragged', action='store_true')
  parser.add_argument('--no_recompute', action='store_true')
  return parser


def main() -> None:
  """Runs the command line."""
  flags = _parser().parse_args()
  names = {field.name for field in dataclasses.fields(Options)}
  options = Options(**{k: v for k, v in vars(flags).items() if k in names})
  options = change(
    options,
    {
      'kernels': {
        'weight_bytes': flags.weight_bytes,
        'cache_bytes': flags.cache_bytes,
        'layer_scale': flags.layer_scale,
        'ragged': flags.ragged,
        'draft': flags.draft,
        'recompute': not flags.no_recompute,
      }
    },
  )
  device = device_costs.load(flags.costs) if flags.costs else None
  print('Simulated seconds; nothing in this table was measured.\n')
  if flags.what == 'targets':
    print_targets(options, device)
    return
  print_parts(
    flags.setting,
    lambda name: simulate(SETTINGS[name], options, device=device),
  )


if __name__ == '__main__':
  main()
