"""Sets of games behind one small interface: generated, or ALFWorld's own.

`open_split` gives the games of a split by number. Run as a program, it writes
generated games as folders that ALFWorld itself loads:

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

from envs.alfworld import expert, facts, houses, pddl, world

# Games of the official splits after the official filter.
NUM_GAMES = {'train': 3553, 'valid_seen': 140, 'valid_unseen': 134}
_FOLDER = 'json_2.1.1'
_GAME = 'game.tw-pddl'
_TRAJECTORY = 'traj_data.json'
# Beside the games that this program wrote: their number and their options.
_MANIFEST = 'generated.json'
# These find a fact without parsing 100 KB of JSON for each of thousands of
# games.
_SOLVABLE = re.compile(rb'"solvable":\s*true')
_TASK_TYPE = re.compile(rb'"task_type":\s*"(\w+)"')


class GameSet(Protocol):
  """The games of one split, by number."""

  def __len__(self) -> int: ...

  def kind(self, index: int) -> str:
    """Returns the task type of a game."""

  def world(self, index: int) -> world.World:
    """Returns a game."""

  def path(self, index: int) -> str | None:
    """Returns the game file, None for a generated game."""


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
    data_dir: folder of `alfworld-download` or of this program, or the
      json_2.1.1 in it; None or '' generates games.
    expected_counts: whether another number of games in `data_dir` than the
      official one is an error.
    num_games: number of generated games; None for as many as the official
      split has.
    num_held_out: the same of the splits other than 'train', where it differs.
    seed: of generated games, as are the next three; see `houses.generate`.
    rooms: sorts of rooms.
    receptacles: fewest and most receptacles.
    distractors: fewest and most things that the task does not name.
    task_types: task types to generate or, with `data_dir`, to keep.

  Raises:
    ValueError: in one line, if an argument or the folder cannot be used.
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
  for name, number in (
    ('num_games', num_games),
    ('num_held_out', num_held_out),
  ):
    if number is not None and number < 1:
      raise ValueError(f'env.generator.{name}={number}: must be at least 1')
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


class Generated:
  """Games made on demand."""

  def __init__(self, split: str, num_games: int, options: dict[str, object]):
    self._split = split
    self._num_games = num_games
    self._options = options

  def __len__(self) -> int:
    return self._num_games

  def kind(self, index: int) -> str:
    """Returns the task type, without making the game."""
    names = ('seed', 'rooms', 'task_types')
    options = {name: self._options[name] for name in names}
    return houses.kind(self._split, self._checked(index), **options)

  def world(self, index: int) -> world.World:
    """Makes the game."""
    return houses.generate(self._split, self._checked(index), **self._options)

  def path(self, index: int) -> None:
    """Returns None: there is no file."""
    self._checked(index)

  def _checked(self, index: int) -> int:
    if not 0 <= index < self._num_games:
      raise IndexError(
        f'{self._split}/{index}: the split has {self._num_games} games'
      )
    return index


class Official:
  """Game files in the layout of `alfworld-download`, in order of their paths.

  Holds what ALFWorld's own loader would: no movable receptacles, no slices,
  only games that are there and marked as solvable.
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
    for path in sorted(_trajectories(folder)):
      task_type = _admit(path)
      if task_type:
        games.append((path.with_name(_GAME), task_type))
    if expected_counts or not games:
      _check_count(split, data_dir, folder, len(games))
    self._games = [game for game in games if game[1] in task_types]

  def __len__(self) -> int:
    return len(self._games)

  def kind(self, index: int) -> str:
    """Returns the task type."""
    return self._games[index][1]

  def world(self, index: int) -> world.World:
    """Reads the game; ValueError, naming the file, if that fails."""
    return _read(self._games[index][0])

  def path(self, index: int) -> str:
    """Returns the game file."""
    return str(self._games[index][0])


@functools.lru_cache(maxsize=256)
def _read(path: pathlib.Path) -> world.World:
  return pddl.read_game(path)


def _split_folder(split: str, data_dir: str) -> pathlib.Path:
  base = pathlib.Path(data_dir).expanduser()
  for folder in (base / _FOLDER / split, base / split):
    if folder.is_dir():
      return folder
  raise ValueError(
    f'env.data_dir={data_dir}: no {_FOLDER}/{split} folder there; get the '
    'games with `alfworld-download --data-dir DIR` or leave it empty for '
    'generated games'
  )


def _trajectories(folder: pathlib.Path) -> list[pathlib.Path]:
  found = []
  for root, _, files in os.walk(folder):
    # Of the path below the split only: where the data lies says nothing.
    name = os.path.relpath(root, folder)
    if _TRAJECTORY in files and _GAME in files:
      if 'movable' not in name and 'Sliced' not in name:
        found.append(pathlib.Path(root, _TRAJECTORY))
  return found


def _admit(trajectory: pathlib.Path) -> str | None:
  """Returns the task type of a game to keep, None for others."""
  game = trajectory.with_name(_GAME)
  task_type = _find(_TASK_TYPE, trajectory.read_bytes())
  if task_type is None:
    raise ValueError(
      f'{trajectory}: not a trajectory file: has no task_type; get it again'
    )
  kind = task_type[1].decode()
  if kind not in world.TASK_TYPES:
    return None
  text = game.read_bytes()
  if not _find(_SOLVABLE, text):
    try:
      json.loads(text)
    except ValueError as error:
      raise ValueError(
        f'{game}: not a readable game file: {error}; get it again'
      ) from error
    return None
  return kind


def _find(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
  for match in pattern.finditer(text):
    # Escaped quotes are part of a string, not of a key.
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
        f'{manifest}: does not tell the number of games ({error}); make them '
        'again'
      ) from error
  if count != expected or not count:
    raise ValueError(
      f'env.data_dir={data_dir}: {count} {split} games there, not {expected}; '
      'complete the folder, or allow it with '
      'env.generator.expected_counts=False'
    )


def write_game(game: world.World, folder: pathlib.Path) -> pathlib.Path:
  """Writes a game as ALFWorld keeps it; returns the game file.

  Args:
    game: the game.
    folder: of the split; the game gets <task>/<trial> in it.
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
  """Returns what ALFWorld and its experts read of a trajectory file."""
  task, _, trial = game.name.partition('/')
  number = int(task.rsplit('-', 1)[-1])
  in_light = game.goal.task_type == 'look_at_obj_in_light'
  place = game.goal.receptacle_type
  annotation = {'task_desc': game.task.rstrip('.'), 'high_descs': []}
  return {
    'images': [],
    'pddl_params': {
      'mrecep_target': '',
      'object_sliced': False,
      'object_target': game.goal.object_type,
      'parent_target': '' if in_light else place,
      'toggle_target': place if in_light else '',
    },
    'plan': {'high_pddl': [], 'low_actions': []},
    'scene': {'floor_plan': f'FloorPlan{number}', 'scene_num': number},
    'task_id': trial,
    'task_type': game.goal.task_type,
    'turk_annotations': {'anns': [annotation]},
  }


def write_split(
  out: str, split: str, games: GameSet, options: dict[str, object]
) -> pathlib.Path:
  """Writes all games of a set; returns the folder of the split.

  Args:
    out: folder that a later run gives as `data_dir`.
    split: name of the split.
    games: the games.
    options: what they were made with, for the record.

  Raises:
    ValueError: if the split has games there already.
  """
  folder = pathlib.Path(out).expanduser() / _FOLDER / split
  if folder.is_dir() and any(folder.iterdir()):
    raise ValueError(f'--out={out}: {folder} is not empty')
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
  print(f'{len(games)} games in {folder}')


if __name__ == '__main__':
  main()
