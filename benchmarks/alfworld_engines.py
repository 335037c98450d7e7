"""Benchmark both ALFWorld engines and print a table.

  python benchmarks/alfworld_engines.py [--games 500] [--output FILE]

Each engine runs alone in its own process, on the same generated games with the
same random actions. Times are wall-clock times; check the load of the machine.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import pathlib
import platform
import random
import time
from typing import Any

from envs.alfworld import expert, houses, native, textworld

ENGINES = ('native', 'textworld')
NUM_PLAYED_GAMES = 20
NUM_STEPS_PER_GAME = 50
NUM_ENVS = 8
# Number of games before growth is measured, so that caches are full.
NUM_WARM_UP_GAMES = 30

ROWS = {
  'steps_per_sec': ('steps/s, with admissible commands', '{:,.0f}'),
  'new_game_ms': ('load + reset of a new game, ms', '{:,.2f}'),
  'same_game_ms': ('load + reset of the same game again, ms', '{:,.2f}'),
  'base_mib': ('memory of the process before any engine, MiB', '{:.0f}'),
  'first_mib': ('memory added by the first environment, MiB', '{:.1f}'),
  'env_mib': ('memory added by each further environment, MiB', '{:.2f}'),
  'growth_mib': (
    'growth over {games} resets of different games, MiB',
    '{:.1f}',
  ),
}


def _memory_mib() -> float:
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE') / 2**20


def _make(name: str) -> Any:
  if name == 'native':
    return native.NativeEngine()
  return textworld.TextWorldEngine()


def _seconds(function: Any, *arguments: Any) -> float:
  start = time.perf_counter()
  function(*arguments)
  return time.perf_counter() - start


def _start(engine: Any, world: Any) -> None:
  engine.load(world)
  engine.reset()


def _steps_per_sec(engine: Any, worlds: list[Any]) -> float:
  """Returns steps/s of expert actions followed by random actions."""
  rng = random.Random(0)
  spent = 0.0
  for world in worlds:
    engine.load(world)
    state = engine.reset()
    plan = expert.plan(world)
    for turn in range(NUM_STEPS_PER_GAME):
      scripted = turn < len(plan)
      command = plan[turn] if scripted else rng.choice(state.admissible)
      start = time.perf_counter()
      state = engine.step(command)
      spent += time.perf_counter() - start
  return len(worlds) * NUM_STEPS_PER_GAME / spent


def _measure(name: str, num_games: int, pipe: Any) -> None:
  worlds = (houses.generate('train', i, seed=0) for i in itertools.count())
  played = list(itertools.islice(worlds, NUM_PLAYED_GAMES))
  base_mib = _memory_mib()
  engine = _make(name)
  _start(engine, played[0])
  first_mib = _memory_mib()
  new = [_seconds(_start, engine, world) for world in played[1:]]
  same = [_seconds(_start, engine, played[-1]) for _ in played]
  steps_per_sec = _steps_per_sec(engine, played)
  single_mib = _memory_mib()
  others = [_make(name) for _ in range(NUM_ENVS)]
  for other, world in zip(others, worlds, strict=False):
    _start(other, world)
  several_mib = _memory_mib()
  for world in itertools.islice(worlds, NUM_WARM_UP_GAMES):
    _start(engine, world)
  warm_mib = _memory_mib()
  for world in itertools.islice(worlds, num_games):
    _start(engine, world)
  pipe.send(
    {
      'steps_per_sec': steps_per_sec,
      'new_game_ms': 1000 * sum(new) / len(new),
      'same_game_ms': 1000 * sum(same) / len(same),
      'base_mib': base_mib,
      'first_mib': first_mib - base_mib,
      'env_mib': (several_mib - single_mib) / NUM_ENVS,
      'growth_mib': _memory_mib() - warm_mib,
    }
  )


def _in_fresh_process(name: str, num_games: int) -> dict[str, float]:
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_measure, args=(name, num_games, sender))
  process.start()
  # Close the sender here, so that a dead child raises EOFError instead of
  # blocking.
  sender.close()
  results = receiver.recv()
  process.join()
  return results


def _table(results: dict[str, dict[str, float]], num_games: int) -> str:
  lines = ['| | ' + ' | '.join(results) + ' |', '|---' * 3 + '|']
  for key, (label, form) in ROWS.items():
    cells = [form.format(result[key]) for result in results.values()]
    lines.append(f'| {label.format(games=num_games)} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main() -> None:
  """Measures both engines one after the other."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--games', type=int, default=500)
  parser.add_argument('--output', type=pathlib.Path)
  arguments = parser.parse_args()
  load = os.getloadavg()[0]
  results = {name: _in_fresh_process(name, arguments.games) for name in ENGINES}
  table = _table(results, arguments.games)
  print(table)
  if arguments.output:
    arguments.output.write_text(
      '# ALFWorld engines\n\n'
      f'`python benchmarks/alfworld_engines.py --games {arguments.games}`, '
      f'Python {platform.python_version()}, {os.cpu_count()} cores, '
      f'load {load:.1f} at the start, one process, one core. Generated games, '
      f'{NUM_PLAYED_GAMES} played for {NUM_STEPS_PER_GAME} steps each.\n\n'
      f'{table}\n'
    )
  print(json.dumps(results))


if __name__ == '__main__':
  main()
