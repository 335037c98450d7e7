"""Sets of ALFWorld games, generated or official, behind one interface.

`open_split` returns the games of a split by index. As a program, this module
writes generated games as folders that ALFWorld can load:

  python -m envs.alfworld.games --out games --split train --num 500 --seed 0
"""

import argparse
import functools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Protocol

import tqdm

from envs import seeds
from envs.alfworld import expert, facts, houses, pddl, world

# Numbers of games of the official splits, after the official filter.
NUM_GAMES = {'train': 3553, 'valid_seen': 140, 'valid_unseen': 134}
_FOLDER = 'json_2.1.1'
_GAME = 'game.tw-pddl'
_TRAJECTORY = 'traj_data.json'
# File with the number and the options of games that this program wrote.
_MANIFEST = 'generated.json'
# Regular expressions avoid parsing 100 KB of JSON for each of thousands of
# games.
_SOLVABLE = re.compile(rb'"solvable":\s*true')
_TASK_TYPE = re.compile(rb'"task_type":\s*"(\w+)"')


class GameSet(Protocol):
  """The games of a split, by index."""

  def __len__(self) -> int: ...

  def task_type(self, index: int) -> str:
    """Returns the task type of a game."""

  def world(self, index: int) -> world.World:
    """Returns a game."""

  def path(self, index: int) -> str | None:
    """Returns the path of the game file; None for a generated game."""


def open_split(
  split: str,
  *,
  data_dir: str | None = None,
  expected_counts: bool = True,
  num_games: int | None = None,
  num_held_out: int | None = None,
  seed: int = 0,
  rooms: Sequence[str] = facts.ROOMS,
  receptacles: Sequence[int] | None = None,
  distractors: Sequence[int] | None = None,
  task_types: Sequence[str] = world.TASK_TYPES,
) -> GameSet:
  """Returns the games of a split.

  Args:
    split: 'train', 'valid_seen' or 'valid_unseen'.
    data_dir: folder of `alfworld-download` or of this program, or its
      json_2.1.1 folder; None or '' generates games.
    expected_counts: whether a number of games in `data_dir` other than the
      official one is an error.
    num_games: number of generated games; None for the official number.
    num_held_out: number of generated games of splits other than 'train'; None
      for `num_games`.
    seed: seed of generated games. For this and the next three see
      `houses.generate`.
    rooms: room types.
    receptacles: minimum and maximum number of receptacles.
    distractors: minimum and maximum number of objects that the task does not
      name.
    task_types: task types to generate or, with `data_dir`, to keep.

  Raises:
    ValueError: in one line, if an argument or the folder is invalid.
  """
  if split not in NUM_GAMES:
    raise ValueError(f'split={split}: must be one of {", ".join(NUM_GAMES)}')
  houses.check_options(
    rooms=rooms,
    receptacles=receptacles,
    distractors=distractors,
    task_types=task_types,
  )
  if data_dir:
    return Official(
      split, data_dir, expected_counts=expected_counts, task_types=task_types
    )
  _check_counts(num_games=num_games, num_held_out=num_held_out)
  if split != 'train':
    num_games = num_held_out or num_games
  options = {
    'seed': seed,
    'rooms': tuple(rooms),
    'receptacles': receptacles and tuple(receptacles),
    'distractors': distractors and tuple(distractors),
    'task_types': tuple(task_types),
  }
  return Generated(split, num_games or NUM_GAMES[split], options)


def _check_counts(**counts: int | None) -> None:
  for name, count in counts.items():
    if count is not None and count < 1:
      raise ValueError(f'env.generator.{name}={count}: must be at least 1')


def _check_index(split: str, index: int, num_games: int) -> None:
  if not 0 <= index < num_games:
    raise IndexError(f'{split}/{index}: the split has {num_games} games')


class Generated:
  """Games that are generated on demand."""

  def __init__(self, split: str, num_games: int, options: dict[str, object]):
    self._split = split
    self._num_games = num_games
    self._options = options

  def __len__(self) -> int:
    return self._num_games

  def task_type(self, index: int) -> str:
    """Returns the task type without generating the game."""
    names = ('seed', 'rooms', 'task_types')
    options = {name: self._options[name] for name in names}
    _check_index(self._split, index, self._num_games)
    return houses.task_type(self._split, index, **options)

  def world(self, index: int) -> world.World:
    """Generates and returns a game."""
    _check_index(self._split, index, self._num_games)
    return houses.generate(self._split, index, **self._options)

  def path(self, index: int) -> None:
    """Returns None, because there is no file."""
    _check_index(self._split, index, self._num_games)


class Official:
  """Game files in the layout of `alfworld-download`, in a mixed order.

  Applies the filter of ALFWorld's own loader: no movable receptacles, no sliced
  objects, and only existing games that are marked as solvable.
  """

  def __init__(
    self,
    split: str,
    data_dir: str,
    *,
    expected_counts: bool = True,
    task_types: Sequence[str] = world.TASK_TYPES,
  ):
    folder = _split_folder(split, data_dir)
    games = []
    for name in seeds.mix(_trajectories(folder)):
      path = folder / name
      task_type = _admit(path)
      if task_type:
        games.append((path.with_name(_GAME), task_type))
    if expected_counts or not games:
      _check_count(split, data_dir, folder, len(games))
    self._split = split
    self._games = [game for game in games if game[1] in task_types]

  def __len__(self) -> int:
    return len(self._games)

  def task_type(self, index: int) -> str:
    """Returns the task type of a game."""
    return self._game(index)[1]

  def world(self, index: int) -> world.World:
    """Reads and returns a game.

    Raises:
      ValueError: in one line with the file name, if the game is unreadable.
    """
    return _read(self._game(index)[0])

  def path(self, index: int) -> str:
    """Returns the path of the game file."""
    return str(self._game(index)[0])

  def _game(self, index: int) -> tuple[pathlib.Path, str]:
    """Returns the path and the task type of a game."""
    _check_index(self._split, index, len(self._games))
    return self._games[index]


@functools.lru_cache(maxsize=256)
def _read(path: pathlib.Path) -> world.World:
  return pddl.read_game(path)


def _split_folder(split: str, data_dir: str) -> pathlib.Path:
  base = pathlib.Path(data_dir).expanduser()
  for folder in (base / _FOLDER / split, base / split):
    if folder.is_dir():
      return folder
  raise ValueError(
    f'env.data_dir={data_dir}: has no folder {_FOLDER}/{split}; '
    'download the games with `alfworld-download --data-dir DIR`, or use '
    'env.data_dir=generated'
  )


def _trajectories(folder: pathlib.Path) -> list[str]:
  """Returns paths relative to the folder."""
  trajectories = []
  for root, _, files in os.walk(folder):
    # Filter by the path below the split only, not by the location of the data.
    name = os.path.relpath(root, folder)
    if _TRAJECTORY in files and _GAME in files:
      if 'movable' not in name and 'Sliced' not in name:
        trajectories.append(pathlib.PurePath(name, _TRAJECTORY).as_posix())
  return trajectories


def _admit(trajectory: pathlib.Path) -> str | None:
  """Returns the task type of a game, or None if the filter drops it."""
  game = trajectory.with_name(_GAME)
  return _read_task_type(trajectory, game, _version(trajectory), _version(game))


def _version(path: pathlib.Path) -> tuple[int, int]:
  """Returns what changes when a file is written: its size and time."""
  status = path.stat()
  return status.st_size, status.st_mtime_ns


# A run lists its games several times at its start.
@functools.cache
def _read_task_type(
  trajectory: pathlib.Path, game: pathlib.Path, *versions: tuple[int, int]
) -> str | None:
  """Returns the task type that `_admit` returns; reads both files."""
  del versions  # Part of the key of the cache: a changed file is read again.
  task_type = _find(_TASK_TYPE, trajectory.read_bytes())
  if task_type is None:
    raise ValueError(
      f'{trajectory}: not a trajectory file: has no task_type; download '
      'it again'
    )
  name = task_type[1].decode()
  if name not in world.TASK_TYPES:
    return None
  text = game.read_bytes()
  if not _find(_SOLVABLE, text):
    try:
      json.loads(text)
    except ValueError as error:
      raise ValueError(
        f'{game}: not a readable game file: {error}; download it again'
      ) from error
    return None
  return name


def _find(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
  for match in pattern.finditer(text):
    # Escaped quotes are inside a string, so they are not a key.
    if text[match.start() - 1 : match.start()] != b'\\':
      return match
  return None


def _check_count(
  split: str, data_dir: str, folder: pathlib.Path, count: int
) -> None:
  expected = NUM_GAMES[split]
  manifest = folder / _MANIFEST
  if manifest.is_file():
    try:
      expected = json.loads(manifest.read_text())['num_games']
    except (ValueError, LookupError, TypeError) as error:
      raise ValueError(
        f'{manifest}: lacks the number of games ({error}); generate the '
        'games again'
      ) from error
  if count != expected or not count:
    raise ValueError(
      f'env.data_dir={data_dir}: has {count} {split} games, not {expected}; '
      'complete the folder, or accept it with '
      'env.generator.expected_counts=False'
    )


def write_game(game: world.World, folder: pathlib.Path) -> pathlib.Path:
  """Writes a game in ALFWorld's layout; returns the path of the game file.

  Args:
    game: the game.
    folder: folder of the split; the game is written to <task>/<trial> in it.
  """
  target = folder / game.name
  target.mkdir(parents=True, exist_ok=True)
  data = pddl.to_game(game, walkthrough=expert.plan(game))
  (target / 'initial_state.pddl').write_text(str(data['pddl_problem']))
  (target / _TRAJECTORY).write_text(json.dumps(_trajectory(game), indent=1))
  path = target / _GAME
  path.write_text(json.dumps(data))
  return path


def _trajectory(game: world.World) -> dict[str, object]:
  """Returns the trajectory data that ALFWorld and its experts read."""
  task, _, trial = game.name.partition('/')
  floor_plan = int(task.rsplit('-', 1)[-1])
  in_light = game.goal.task_type == 'look_at_obj_in_light'
  receptacle = game.goal.receptacle_type
  annotation = {'task_desc': game.task.rstrip('.'), 'high_descs': []}
  return {
    'images': [],
    'pddl_params': {
      'mrecep_target': '',
      'object_sliced': False,
      'object_target': game.goal.object_type,
      'parent_target': '' if in_light else receptacle,
      'toggle_target': receptacle if in_light else '',
    },
    'plan': {'high_pddl': [], 'low_actions': []},
    'scene': {'floor_plan': f'FloorPlan{floor_plan}', 'scene_num': floor_plan},
    'task_id': trial,
    'task_type': game.goal.task_type,
    'turk_annotations': {'anns': [annotation]},
  }


def write_split(
  out: str, split: str, games: GameSet, options: dict[str, object]
) -> pathlib.Path:
  """Writes all games of a set; returns the folder of the split.

  Args:
    out: folder to write to, the `data_dir` of a later run.
    split: name of the split.
    games: the games.
    options: options of the generator, for the record.

  Raises:
    ValueError: if the folder of the split is not empty.
  """
  folder = pathlib.Path(out).expanduser() / _FOLDER / split
  if folder.is_dir() and any(folder.iterdir()):
    raise ValueError(f'--out={out}: {folder} is not empty; choose another')
  folder.mkdir(parents=True, exist_ok=True)
  for index in tqdm.tqdm(range(len(games)), desc=split, unit='game'):
    write_game(games.world(index), folder)
  manifest = {'num_games': len(games), **options}
  (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + '\n')
  return folder


def main(argv: Sequence[str] | None = None) -> None:
  """Writes generated games; see --help."""
  parser = argparse.ArgumentParser(
    prog='python -m envs.alfworld.games',
    description='Generates ALFWorld games in the official folder layout.',
  )
  parser.add_argument('--out', required=True, help='folder to write to')
  parser.add_argument('--split', default='train', choices=NUM_GAMES)
  parser.add_argument('--num', type=int, help='number of games (all)')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--rooms', nargs='+', default=list(facts.ROOMS))
  parser.add_argument(
    '--receptacles', nargs=2, type=int, metavar=('LOW', 'HIGH')
  )
  parser.add_argument(
    '--distractors', nargs=2, type=int, metavar=('LOW', 'HIGH')
  )
  parser.add_argument('--task_types', nargs='+', default=list(world.TASK_TYPES))
  options = vars(parser.parse_args(argv))
  out, split = options.pop('out'), options.pop('split')
  num_games = options.pop('num')
  try:
    games = open_split(split, num_games=num_games, **options)
    folder = write_split(out, split, games, options)
  except ValueError as error:
    parser.error(str(error))
  except OSError as error:
    parser.error(f'--out={out}: cannot be written ({error})')
  print(f'{len(games)} games in {folder}')


if __name__ == '__main__':
  main()
