"""Simulate an iteration of training on an accelerator, from a table of costs.

    python benchmarks/simulate.py --setting 1.5b-h100
    python benchmarks/simulate.py --setting 1.5b-2xh100 --no-evaluation_inside
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
import workload

from gigpo_jax import carry_over, rollout, sampler
from gigpo_jax.models import published


@dataclasses.dataclass(frozen=True)
class Setting:
  """A model on devices.

  Attributes:
    model: name in `published.SHAPES`.
    device: name in `device_costs.DEVICES`.
    devices: number of devices.
    hosts: number of hosts, each with its share of the devices.
    tensor: devices of a copy of the model in the sampler.
    sequences: sequences of a microbatch, `learner.microbatch_tokens` / 2,560.
    recomputes: whether `model.remat=auto` recomputes layers.
  """

  model: str
  device: str
  devices: int = 1
  hosts: int = 1
  tensor: int = 1
  sequences: int = 16
  recomputes: bool = True

  @property
  def is_gpu(self) -> bool:
    """Whether the devices are GPUs."""
    return self.device.startswith('h')


SETTINGS = {
  '1.5b-h100': Setting('Qwen2.5-1.5B', 'h100'),
  '1.5b-h200': Setting('Qwen2.5-1.5B', 'h200', recomputes=False),
  '1.5b-2xh100': Setting('Qwen2.5-1.5B', 'h100', 2, recomputes=False),
  '1.5b-8xh100': Setting('Qwen2.5-1.5B', 'h100', 8, recomputes=False),
  '7b-8xh100': Setting('Qwen2.5-7B', 'h100', 8, sequences=8, recomputes=False),
  '1.5b-v5e-16': Setting('Qwen2.5-1.5B', 'v5e', 16, hosts=4),
  '7b-v5e-16': Setting('Qwen2.5-7B', 'v5e', 16, hosts=4, tensor=4, sequences=8),
  '7b-v5p-8': Setting('Qwen2.5-7B', 'v5p', 4, sequences=8),
}


@dataclasses.dataclass(frozen=True)
class Options(simulated_update.Options):
  """What can be changed; the defaults are those of configs/alfworld.py.

  See also the options of updates. `sequences=0` and `kernels.recompute=True`
  are what the setting has.

  Attributes:
    row_buckets: `rollout.batch_buckets`, ascending; the last is the slots of a
      host.
    prompt_buckets: `rollout.prompt_buckets`.
    chunk: `rollout.decode_tokens`.
    tokens_per_step: tokens that a decoding step adds to a completion.
    evaluation_inside: whether evaluation episodes share the training rollout.
    carry_over: `rollout.carry_over`, turns of an episode in an iteration; 0:
      all. Above 0, an iteration is the mean of several in the steady state.
    max_staleness: `rollout.max_staleness`.
    host: seconds of the host.
  """

  row_buckets: tuple[int, ...] = (32, 64, 128)
  prompt_buckets: tuple[int, ...] = (1024, 2048)
  sequences: int = 0
  chunk: int = 8
  tokens_per_step: float = 1.0
  evaluation_inside: bool = True
  carry_over: int = 0
  max_staleness: int = 4
  host: virtual_device.HostCosts = virtual_device.HostCosts(
    chunk_secs=0.8e-3, slot_secs=4e-6, turn_secs=0.35e-3, env_secs=0.3e-3
  )


@dataclasses.dataclass(frozen=True)
class RolloutTimes:
  """A simulated rollout, or the mean of several.

  Attributes:
    secs: its duration.
    device_secs: time of the device by program.
    stats: counters of the sampler, summed over hosts.
    lengths: (prompt, response) tokens of each trained row, of all rollouts.
    groups: number of trained groups.
  """

  secs: float
  device_secs: dict[str, float]
  stats: sampler.Stats
  lengths: np.ndarray
  groups: float = 0.0

  @property
  def occupancy(self) -> float:
    """Returns the share of slots and steps that produced a token."""
    return self.stats.decode_tokens / self.stats.slot_steps


_COUNTERS = ('prefill_tokens', 'decode_tokens', 'slot_steps', 'padded_tokens')


def _sum_stats(parts: Sequence[sampler.Stats]) -> sampler.Stats:
  return sampler.Stats(
    **{n: sum(getattr(part, n) for part in parts) for n in _COUNTERS}
  )


def simulate_rollout(
  setting: Setting,
  device: device_costs.Device,
  options: Options,
  work: workload.Workload,
  batches: Sequence[rollout.EpisodeBatch],
) -> tuple[RolloutTimes, list[workload.Trajectories]]:
  """Returns a rollout, as long as the slowest host's, and its trajectories.

  Args:
    setting: model and devices.
    device: rates of a device.
    options: sizes and choices.
    work: lengths of the episodes.
    batches: the episodes.
  """
  parts, played = [], [[] for _ in batches]
  for host in range(setting.hosts):
    share = [workload.host_part(b, host, setting.hosts) for b in batches]
    part, trajectories = _host_rollout(setting, device, options, work, share)
    parts.append(part)
    for all_hosts, one_host in zip(played, trajectories, strict=True):
      # Each episode is a group of its own; a host counts its own from 0.
      start = len(all_hosts)
      all_hosts += [
        dataclasses.replace(t, group=start + t.group) for t in one_host
      ]
  slowest = max(parts, key=lambda part: part.secs)
  stats = _sum_stats([part.stats for part in parts])
  return dataclasses.replace(slowest, stats=stats), played


def _host_rollout(
  setting: Setting,
  device: device_costs.Device,
  options: Options,
  work: workload.Workload,
  batches: Sequence[rollout.EpisodeBatch],
) -> tuple[RolloutTimes, list[workload.Trajectories]]:
  """Runs the runner and the sampler of one host in virtual time."""
  clock = virtual_device.Clock()
  copies = setting.devices // setting.hosts // setting.tensor
  with virtual_device.installed(
    clock,
    make_costs(setting, device, options, copies),
    copies=copies,
    tokens_per_step=options.tokens_per_step,
    ends_early=not setting.is_gpu,
    platform='gpu' if setting.is_gpu else 'tpu',
  ):
    kernel = 'triton' if setting.is_gpu else 'paged'
    engine = virtual_device.make_sampler(
      kernel if is_ragged(setting, options) else 'xla',
      prompt_buckets=options.prompt_buckets,
      batch_buckets=options.row_buckets,
      max_completion_tokens=options.max_completion,
      decode_tokens=options.chunk,
    )
    episodes = sum(len(b.paused or b.tasks) for b in batches)
    # A separate evaluation has the environments of the training episodes.
    training = -(-work.groups * work.members // setting.hosts)
    is_evaluation = any(task.split == 'evaluation' for task in batches[0].tasks)
    envs = training if is_evaluation else max(1, episodes)
    runner = make_runner(clock, engine, options, work, envs)
    trajectories = runner.run_batches({}, batches)
  clock.wait(clock.free)
  times = RolloutTimes(
    clock.now, dict(clock.secs), runner.stats, np.zeros((0, 2), int)
  )
  return times, trajectories


def make_runner(
  clock: virtual_device.Clock,
  engine: sampler.Sampler,
  options: Options,
  work: workload.Workload,
  num_envs: int,
) -> rollout.EpisodeRunner:
  """Returns a runner of episodes of forced lengths in virtual time."""
  lengths = work.lengths
  pool = virtual_device.VirtualPool(clock, options.host, num_envs, work.members)
  return rollout.EpisodeRunner(
    forced.Pool(
      pool,
      lengths.turns,
    ),
    forced.Sampler(engine, lengths.response),
    forced.Tokenizer(virtual_device.VirtualTokenizer(), lengths.prompt),
    options.prompt_buckets[-1],
    'error',
  )


def row_lengths(trajectories: workload.Trajectories) -> np.ndarray:
  """Returns (prompt, response) tokens of each row."""
  lengths = [
    (len(step.prompt_ids), len(step.completion_ids))
    for t in trajectories
    for step in t.steps
  ]
  return np.array(lengths, int).reshape(-1, 2)


def is_ragged(setting: Setting, options: Options) -> bool:
  """Returns whether decoding reads used positions only."""
  given = options.kernels.ragged
  return setting.is_gpu if given is None else given


def make_costs(
  setting: Setting,
  device: device_costs.Device,
  options: Options,
  copies: int,
) -> virtual_device.Costs:
  """Returns the seconds of the sampler's programs."""
  model, kernels = published.SHAPES[setting.model], options.kernels
  sizes = {'tensor': setting.tensor, 'kernels': kernels}

  def decode(steps: int, rows: int, length: int, used: float) -> float:
    positions = used if is_ragged(setting, options) else rows * length
    step = device_costs.decode_secs(
      device, model, rows=rows / copies, positions=positions / copies, **sizes
    )
    return steps * step + device.program_secs

  def prefill(rows: int, length: int) -> float:
    return device_costs.prefill_secs(
      device, model, rows=rows / copies, length=length, **sizes
    )

  def extend(rows: int, tokens: int, length: int) -> float:
    return device_costs.extend_secs(
      device, model, rows=rows / copies, tokens=tokens, length=length, **sizes
    )

  def copy(rows: int, length: int) -> float:
    moved = rows * length * device_costs.cache_numbers(model)
    moved *= 2 * kernels.cache_bytes / copies / setting.tensor
    return moved / device.copy_rate + device.program_secs

  return virtual_device.Costs(prefill, decode, copy, extend, options.host)


def roofline_secs(
  setting: Setting,
  device: device_costs.Device,
  work: workload.Workload,
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


_WORK = workload.Workload()


def simulate(
  setting: Setting,
  options: Options = Options(),
  work: workload.Workload = _WORK,
  device: device_costs.Device | None = None,
) -> Iteration:
  """Returns a simulated iteration."""
  device = device or device_costs.DEVICES[setting.device]
  run = functools.partial(simulate_rollout, setting, device, options, work)
  training, iterations, count = simulate_training(options, work, run)
  evaluation = 0.0
  if work.evaluation_tasks and work.evaluation_every:
    batches = [work.evaluation()]
    if options.evaluation_inside:
      # Training episodes start first.
      alone, _ = run(iterations.batches())
      together, _ = run([*iterations.batches(), *batches])
      evaluation = together.secs - alone.secs
    else:
      evaluation = run(batches)[0].secs
    evaluation /= work.evaluation_every
  kernels = options.kernels
  recompute = kernels.recompute and setting.recomputes
  update = simulated_update.simulate(
    device,
    published.SHAPES[setting.model],
    dataclasses.replace(
      options,
      sequences=options.sequences or setting.sequences,
      kernels=dataclasses.replace(kernels, recompute=recompute),
    ),
    training.lengths,
    setting.devices,
  )
  limit = roofline_secs(setting, device, work, training.lengths)
  return Iteration(
    training, evaluation, update.divided_by(count), limit / count
  )


def simulate_training(
  options: Options,
  work: workload.Workload,
  run: Callable[[list[rollout.EpisodeBatch]], tuple[RolloutTimes, list]],
) -> tuple[RolloutTimes, workload.Iterations, int]:
  """Returns the mean of rollouts, the iterations after them, and their count.

  Args:
    options: sizes and choices.
    work: the episodes.
    run: returns times and trajectories of batches.
  """
  rule = carry_over.CarryOver(options.carry_over, options.max_staleness)
  iterations = workload.Iterations(work, rule)
  count, times, lengths, groups = 1, [], [], 0

  def record(batches: list[rollout.EpisodeBatch]) -> list:
    played, trajectories = run(batches)
    times.append(played)
    return trajectories

  if options.carry_over:
    # From then on, groups of all ages wait. Twice as many are averaged.
    ages = -(-work.lengths.max_turns // options.carry_over)
    first = min(ages - 1, options.max_staleness)
    for _ in range(first):
      iterations.play(record)
    times.clear()
    count = 2 * (first + 1)
  for _ in range(count):
    trained = iterations.play(record)
    lengths.append(row_lengths(trained))
    groups += len(trained) // work.members
  names = {name for part in times for name in part.device_secs}
  mean = RolloutTimes(
    sum(part.secs for part in times) / count,
    {
      name: sum(part.device_secs.get(name, 0.0) for part in times) / count
      for name in names
    },
    _sum_stats([part.stats for part in times]),
    np.concatenate(lengths),
    groups / count,
  )
  return mean, iterations, count


# Seconds of an iteration to reach.
TARGETS = {
  '1.5b-h100': 120,
  '1.5b-2xh100': 65,
  '7b-v5e-16': 200,
  '7b-8xh100': 110,
}

# Options of a run in the order in which they are added, with those here.
CHANGES: dict[str, dict[str, Any]] = {
  'loss.old_log_probs=sampler': {'forward_passes': 1},
  'rollout.carry_over=20': {'carry_over': 20},
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


def print_parts(
  names: Sequence[str],
  options: Options,
  device: device_costs.Device | None = None,
) -> None:
  """Prints a table with the parts of an iteration of each setting."""
  print(
    '| case | limit | prefill | decode | rollout | slots | eval | log-probs '
    '| update | exchange | padding | total | share |'
  )
  print('|---' * 13 + '|')
  for name in names:
    result = simulate(SETTINGS[name], options, device=device)
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
  names: Sequence[str],
  options: Options,
  device: device_costs.Device | None = None,
) -> None:
  """Prints iterations as options are added, next to the targets."""
  targets = {name: TARGETS[name] for name in names if name in TARGETS}
  print('| seconds of an iteration | ' + ' | '.join(targets) + ' |')
  print('|---' * (len(targets) + 1) + '|')
  print('| target | ' + ' | '.join(map(str, targets.values())) + ' |')
  for name, fields in ({'configs/alfworld.py': {}} | CHANGES).items():
    options = change(options, fields)
    cells = []
    for setting, target in targets.items():
      low, high = simulate(SETTINGS[setting], options, device=device).secs
      text = _range(low, high)
      cells.append(f'**{text}**' if high <= target else text)
    row = ' | '.join([f'+ `{name}`' if fields else f'`{name}`', *cells])
    print(f'| {row} |', flush=True)


def print_carry_over(
  names: Sequence[str],
  options: Options,
  device: device_costs.Device | None = None,
) -> None:
  """Prints rollouts by the turns of an episode in an iteration."""
  work = workload.Workload(evaluation_tasks=0)
  print(
    '| case | turns per iteration | rollout, s | trained groups '
    f'| seconds per {work.groups} groups | speed | slots |'
  )
  print('|---' * 7 + '|')
  for name in names:
    everything = None
    for turns in (0, 25, 20, 15, 10):
      changed = dataclasses.replace(options, carry_over=turns)
      played = simulate(SETTINGS[name], changed, work, device).rollout
      secs = played.secs * work.groups / played.groups
      everything = everything or secs
      print(
        f'| {name} | {turns or "all"} | {played.secs:.1f} '
        f'| {played.groups:.1f} | {secs:.1f} | {everything / secs:.2f}x '
        f'| {played.occupancy:.0%} |',
        flush=True,
      )


def _sizes(text: str) -> tuple[int, ...]:
  return tuple(int(size) for size in text.split(','))


_TABLES = {
  'parts': print_parts,
  'targets': print_targets,
  'carry_over': print_carry_over,
}


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=tuple(_TABLES), default='parts')
  parser.add_argument(
    '--setting',
    choices=SETTINGS,
    nargs='+',
    help='default: all, or with --costs all of its device',
  )
  parser.add_argument('--costs', help='JSON file with rates of a device')
  default = Options()
  for name in ('row_buckets', 'prompt_buckets'):
    parser.add_argument(
      f'--{name}', type=_sizes, default=getattr(default, name)
    )
  for name in (
    'chunk',
    'sequence_tokens',
    'sequences',
    'forward_passes',
    'carry_over',
    'max_staleness',
  ):
    parser.add_argument(f'--{name}', type=int, default=getattr(default, name))
  parser.add_argument('--tokens_per_step', type=float, default=1.0)
  for name in ('evaluation_inside', 'ragged', 'recompute'):
    parser.add_argument(
      f'--{name}',
      action=argparse.BooleanOptionalAction,
      default=None if name == 'ragged' else True,
    )
  for name in ('weight_bytes', 'cache_bytes', 'layer_scale'):
    value = getattr(default.kernels, name)
    parser.add_argument(f'--{name}', type=float, default=value)
  parser.add_argument('--draft', type=int, default=0)
  return parser


def choose_settings(
  names: Sequence[str] | None, device: device_costs.Device | None
) -> list[str]:
  """Returns the settings to simulate.

  Args:
    names: the settings that the user names; None: all.
    device: measured rates of a device; None: the estimated ones of each.

  Raises:
    ValueError: in one line, if a named setting is of another device.
  """
  fitting = [
    name
    for name, setting in SETTINGS.items()
    if device is None or setting.device == device.name
  ]
  for name in names or ():
    if name not in fitting:
      raise ValueError(
        f'--setting={name}: --costs has the rates of {device.name}; must be '
        f'one of {", ".join(fitting)}'
      )
  return list(names or fitting)


def main() -> None:
  """Runs the command line."""
  parser = _parser()
  flags = parser.parse_args()
  device = device_costs.load(flags.costs) if flags.costs else None
  try:
    settings = choose_settings(flags.setting, device)
  except ValueError as error:
    parser.error(str(error))
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
        'recompute': flags.recompute,
      }
    },
  )
  print('Simulated seconds; nothing in this table was measured.\n')
  _TABLES[flags.what](settings, options, device)


if __name__ == '__main__':
  main()
